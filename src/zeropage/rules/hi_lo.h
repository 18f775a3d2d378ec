// Split float32: the bfloat16 that operators see and the 16 bits that it lacks (kernels/formats.h: hi_lo_float32).
// It loses no bits and stores none twice. Rules use a temporary float32, joined before and split after. The temporary
// is deferred, so it exists only in cache-sized pieces or in a kernel's registers.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropage {

/// Joins `high` (bfloat16) and `low` (int16), of one shape, to a float32. If it can be deferred, it has no home until
/// an operator outside programs needs it.
at::Tensor join_hi_lo(const at::Tensor& high, const at::Tensor& low);

/// Splits `value`, of any floating dtype, into high and low; later, if operators on `value` have yet to run.
void split_hi_lo(const at::Tensor& high, const at::Tensor& low, const at::Tensor& value);

}  // namespace zeropage
