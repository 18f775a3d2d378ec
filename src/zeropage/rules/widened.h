// Gradients in mixed precision keep their operators' dtype, and half the bytes, until an operator changes them. The
// program sees a float32 tensor: the result of a deferred operator on the narrow one. The optimizer's update reads
// the narrow tensor and widens it in registers. The float32 tensor gets a home only if it is alive when an operator
// needs its content, for example when gradients are accumulated.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropage {

/// Widens `narrow`, a paged tensor of bfloat16 or float16, to float32; later, if that can be deferred.
at::Tensor widened(const at::Tensor& narrow);
/// Makes `wide`, a float32 tensor without a home, the result of that.
void widen_into(const at::Tensor& wide, const at::Tensor& narrow);

}  // namespace zeropage
