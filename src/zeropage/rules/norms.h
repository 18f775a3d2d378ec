// Norms that are computed before the program requests them. A program that clips requests the norm of each gradient
// in each step, when most of them are evicted. The norm that it last requested of a leaf's gradient is therefore
// computed when the next gradient is made, while that is whole and in memory. The same operator on the same layout
// gives the same bits. The norm is valid as long as the content does not change.
#pragma once

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

/// Computes the norm that the program will probably request of the next gradient of `leaf`, if any. `content` is that
/// gradient in memory, with its strides, and perhaps in a narrower dtype than `dtype`, the one that the program sees.
std::unique_ptr<ForeseenNorm> take_expected_norm(StorageSegment& leaf, const at::Tensor& content,
                                                 c10::ScalarType dtype);
/// Attaches the norm to the gradient, once that is made.
void foresee(const at::Tensor& gradient, std::unique_ptr<ForeseenNorm> norm);

/// The same over ranks, where a gradient arrives in parts: the squares of this rank's share. A norm that was not
/// foreseen reads the share, and has the same bits.
class ArrivingSquares {
 public:
  /// For the next gradient of `leaf`; `elements`: of the share.
  ArrivingSquares(StorageSegment& leaf, std::size_t elements, c10::ScalarType dtype);
  /// Notes what elements [begin, begin + values.numel()) of the share are now. A part that came before may come
  /// again.
  void add(const at::Tensor& values, std::size_t begin);
  /// Attaches the norm to the gradient, once all of it is there.
  void foresee(StorageSegment& gradient);

 private:
  std::unique_ptr<ForeseenNorm> norm_;
  std::size_t elements_;
  std::vector<double> blocks_;  // empty: none is expected
};

}  // namespace zeropage
