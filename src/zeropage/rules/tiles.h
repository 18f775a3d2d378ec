// Tiles: how an operator takes a paged tensor that is too large to be whole in memory. The tensor is seen as rows; a
// tile is a range of rows that lies in one page, and is there while the caller works with it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

/// A contiguous range of a paged tensor, as rows.
struct Rows {
  StorageSegment* segment;
  std::size_t begin;  // element of the segment
  std::int64_t rows, columns;
  at::TensorOptions options;

  /// Of a tensor that is contiguous, or of its `index`-th part along the first dimension, whose last dimension are
  /// the columns.
  explicit Rows(const at::Tensor& tensor);
  Rows part(std::int64_t index, std::int64_t parts) const;
};

/// Libraries compute products of fewer rows or columns by other code, whose bits may differ.
inline constexpr std::int64_t kFewestRows = 16, kFewestColumns = 64;
/// More than these are no faster.
inline constexpr std::int64_t kGoodRows = 256;

/// Calls `run` with the first row and the tile, [n, columns], of consecutive rows: at least kFewestRows, if there are
/// as many. What is read comes ahead of its turn; of what is overwritten, each element must be. Where so many rows do
/// not lie in one page, the tile is put together in memory beside the budget. Throws BudgetError if not even a page
/// can be held.
void for_each_tile(const Rows& rows, Access access,
                   c10::function_ref<void(std::int64_t row, const at::Tensor& tile)> run);

/// An ordinary tensor of the same sizes and strides, with what the paged one holds now; and its content back. For
/// views of small parts of what is large: only pages that they touch are brought.
at::Tensor copy_of_part(const at::Tensor& tensor);
void copy_back(const at::Tensor& copy, const at::Tensor& tensor);

/// Whether operators are to take the tensor in tiles: its segment is larger than the domain's tile_above.
bool is_tiled(const at::Tensor& tensor);

}  // namespace zeropage
