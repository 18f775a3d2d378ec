// Norms that are taken before they are asked for. A program that clips asks for the norm of each gradient in each
// step, when most have left memory. So what was asked of a leaf's gradient the last time is computed when the next
// one is made, while it is whole and in memory, by the same operator on the same layout: the same bits. It holds as
// long as the content does.
#pragma once

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

/// Takes the norm that the next gradient of `leaf` will be asked for, if any. `content` makes what that gradient will
/// hold, in its dtype and strides: a tensor that is in memory.
std::unique_ptr<ForeseenNorm> take_expected_norm(StorageSegment& leaf, c10::function_ref<at::Tensor()> content);
/// Of this gradient, which has been made now.
void foresee(const at::Tensor& gradient, std::unique_ptr<ForeseenNorm> norm);

}  // namespace zeropage
