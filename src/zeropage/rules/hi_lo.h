// A float32 kept as the bfloat16 that operators see and the 16 bits that it lacks (kernels/formats.h: hi_lo_float32):
// nothing is lost, and nothing is kept twice. Rules are given a temporary float32, joined from the two before and
// split into them after; being deferred, it lives in cache-sized pieces or in a kernel's registers.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropage {

/// The float32 of `high` (bfloat16) and `low` (int16), of one shape. Where it can be deferred, it has no home until
/// an operator needs more of it than a program does.
at::Tensor join_hi_lo(const at::Tensor& high, const at::Tensor& low);

/// high and low = value, which is of any floating dtype; later, if what is to change `value` has yet to run.
void split_hi_lo(const at::Tensor& high, const at::Tensor& low, const at::Tensor& value);

}  // namespace zeropage
