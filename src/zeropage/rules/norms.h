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

}  // namespace zeropage
