// Tiles let an operator use a paged tensor that is too large to be whole in memory. The tensor is divided into rows.
// A tile is a range of rows in one page, in memory while the caller works with it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

/// The segment of a tensor that was paged when autograd saved it. Throws AccessError if it no longer is.
StorageSegment& paged_segment(const at::Tensor& tensor);

/// A contiguous range of a paged tensor, as rows.
struct Rows {
  StorageSegment* segment;
  std::size_t begin;  // element of the segment
  std::int64_t rows, columns;
  at::TensorOptions options;

  /// All rows of a contiguous tensor; its last dimension gives the columns.
  explicit Rows(const at::Tensor& tensor);
  /// The `index`-th of `parts` equal parts.
  Rows part(std::int64_t index, std::int64_t parts) const;
  /// `n` rows from `first` on.
  Rows range(std::int64_t first, std::int64_t n) const;
  /// `n` elements of the tensor's segment from `begin` on, each a row.
  static Rows elements(const at::Tensor& tensor, std::size_t begin, std::int64_t n);
  std::size_t bytes() const { return static_cast<std::size_t>(rows * columns) * options.dtype().itemsize(); }
  /// Whether one tile must have all rows.
  bool at_once = false;
  /// Whether one tile may have all rows: a quarter of device_memory holds them.
  bool fits_at_once() const {
    return bytes() <= std::min(segment->cache()->frame_limit(), segment->domain()->cache->frame_limit()) / 4;
  }
};

/// Memory from the device's budget that an operator needs in addition to its tiles.
class Scratch {
 public:
  /// Throws BudgetError if the budget cannot hold it.
  Scratch(const std::shared_ptr<Domain>& domain, std::int64_t elements, at::ScalarType dtype);
  /// Flat; valid while this object lives.
  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor paged_;
  TensorPin pin_;
  at::Tensor tensor_;
};

/// Libraries compute products of fewer rows or columns with other code, whose bits may differ.
inline constexpr std::int64_t kFewestRows = 16, kFewestColumns = 96;
/// A multiple of the columns that their kernels compute at once. Some kernels round remaining columns differently.
inline constexpr std::int64_t kKernelColumns = 48;
/// More rows are no faster.
inline constexpr std::int64_t kGoodRows = 256;

/// Calls `run` for consecutive tiles, with the first row and the tile, [n, columns]. A tile has at least kFewestRows
/// rows, if there are as many; one of doubles at least 12. Pages to read are prefetched; if the access is
/// `overwrite`, `run` must write each element. If one page does not hold enough rows, the tile is assembled: a few
/// rows outside the budget, in at most an eighth of its size; all rows at once in Scratch. Throws BudgetError if that
/// or a page does not fit.
void for_each_tile(const Rows& rows, Access access,
                   c10::function_ref<void(std::int64_t row, const at::Tensor& tile)> run);

/// Copies a view into an ordinary tensor of the same sizes and strides. For small views of large tensors: it loads
/// only the pages that they touch.
at::Tensor copy_of_part(const at::Tensor& tensor);
/// Copies such a copy back.
void copy_back(const at::Tensor& copy, const at::Tensor& tensor);

/// Whether operators must use tiles: the tensor's segment is larger than the domain's tile_above. Over ranks, only
/// whole tensors that all ranks have: an operator in tiles must load the same pages in the same order on all of them,
/// whatever its other operands hold.
bool is_tiled(const at::Tensor& tensor);
/// Whether a tensor is a small part of a segment while not all segments are in memory: operators that can load the
/// part alone should.
bool is_part(const at::Tensor& tensor);

}  // namespace zeropage
