// Gradients of mixed precision, kept as the operators made them, in half the bytes, until an operator changes them.
// The program sees a float32 tensor, as always: it is what a deferred operator makes of the narrow one. The
// optimizer's update reads the narrow one and widens it in registers; the float32 tensor gets a home only if it is
// alive when its content is needed, as where gradients are accumulated.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropage {

/// `narrow`, a paged tensor of bfloat16 or float16, as float32. Nothing is computed yet where that can be deferred.
at::Tensor widened(const at::Tensor& narrow);

}  // namespace zeropage
