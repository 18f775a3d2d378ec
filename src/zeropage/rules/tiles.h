// Tiles: how an operator takes a paged tensor that is too large to be whole in memory. The tensor is seen as rows; a
// tile is a range of rows that lies in one page, and is there while the caller works with it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

/// The segment of what was paged when autograd saved it. Throws AccessError if it is not now.
StorageSegment& paged_segment(const at::Tensor& tensor);

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
  /// `n` rows from `first` on.
  Rows range(std::int64_t first, std::int64_t n) const;
  /// `n` elements of the tensor's segment from `begin` on, each a row.
  static Rows elements(const at::Tensor& tensor, std::size_t begin, std::int64_t n);
  std::size_t bytes() const { return static_cast<std::size_t>(rows * columns) * options.dtype().itemsize(); }
  /// Whether one tile is to have all rows, and may: a quarter of device_memory holds them.
  bool at_once = false;
  bool fits_at_once() const { return bytes() <= segment->cache()->frame_limit() / 4; }
};

/// Memory that an operator needs beside its tiles: of the device's budget.
class Scratch {
 public:
  /// Throws BudgetError if there is not so much.
  Scratch(const std::shared_ptr<Domain>& domain, std::int64_t elements, at::ScalarType dtype);
  /// Flat; no longer than this object.
  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor paged_;
  TensorPin pin_;
  at::Tensor tensor_;
};

/// Libraries compute products of fewer rows or columns by other code, whose bits may differ.
inline constexpr std::int64_t kFewestRows = 16, kFewestColumns = 96;
/// A multiple of the columns that their kernels take at once. Some round what is left over otherwise.
inline constexpr std::int64_t kKernelColumns = 48;
/// More than these are no faster.
inline constexpr std::int64_t kGoodRows = 256;

/// Calls `run` with the first row and the tile, [n, columns], of consecutive rows: at least kFewestRows, if there are
/// as many, and of doubles at least 12. What is read comes ahead of its turn; of what is overwritten, each element
/// must be. Where so many rows do not lie in one page, the tile is put together: of a few rows in memory beside the
/// budget, at most an eighth of it; of all rows at once in Scratch. Throws BudgetError if that, or a page, cannot be
/// held.
void for_each_tile(const Rows& rows, Access access,
                   c10::function_ref<void(std::int64_t row, const at::Tensor& tile)> run);

/// An ordinary tensor of the same sizes and strides, with what the paged one holds now; and its content back. For
/// views of small parts of what is large: only pages that they touch are brought.
at::Tensor copy_of_part(const at::Tensor& tensor);
void copy_back(const at::Tensor& copy, const at::Tensor& tensor);

/// Whether operators are to take the tensor in tiles: its segment is larger than the domain's tile_above.
bool is_tiled(const at::Tensor& tensor);
/// Whether a tensor is a small part of a segment, and not all segments are in memory: operators that can are to bring
/// the part alone.
bool is_part(const at::Tensor& tensor);

}  // namespace zeropage
