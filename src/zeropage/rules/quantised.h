// Optimizer states in fewer bits (kernels/formats.h). Operators see such a tensor as float32, but it has no home: its
// codes hold its content (StorageSegment::quantisation). An operator that needs it gets a temporary, dequantised
// before and, if written, encoded again after. The temporary is deferred, so it exists only in a kernel's registers.
// Only the moments of fused optimizers are quantised, because only there is a tensor's purpose known.
#pragma once

#include <c10/util/FunctionRef.h>

#include "zeropage/kernels/formats.h"
#include "zeropage/rules/call.h"

namespace zeropage {

/// The format of codes: bfloat16 without scales, else 8 bits.
inline kernels::Format format_of_codes(bool has_scales, bool is_signed) {
  if (!has_scales) return kernels::Format::stochastic_bfloat16;
  return is_signed ? kernels::Format::signed_blocks8 : kernels::Format::unsigned_blocks8;
}

/// Quantises the float32 moments in a fused optimizer's call, if the domain wants it.
void quantise_moments(Call& call);

/// Quantises a moment that was loaded, so that it never needs float32's bytes. `name`: its key in the optimizer's
/// state.
void quantise_moment(const at::Tensor& moment, const std::string& name);

/// Whether an operator needs the content of quantised arguments.
bool takes_quantised(const Call& call);

/// Calls `run` with temporaries in place of the call's quantised arguments.
void run_dequantised(Call& call, c10::function_ref<void(Call&)> run);

}  // namespace zeropage
