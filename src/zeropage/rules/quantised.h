// What an optimizer keeps, in fewer bits (kernels/formats.h). Operators see such a tensor as float32, but it
// has no home: its content is what its codes say (StorageSegment::quantisation). An operator that needs it is given a
// temporary, dequantised before and encoded again after if it was written; being deferred, the temporary lives in a
// kernel's registers. What is quantised are the moments of fused optimizers, for there alone is it known what a
// tensor is for.
#pragma once

#include <c10/util/FunctionRef.h>

#include "zeropage/kernels/formats.h"
#include "zeropage/rules/call.h"

namespace zeropage {

/// What codes are: bfloat16 without scales, else 8 bits.
inline kernels::Format format_of_codes(bool has_scales, bool is_signed) {
  if (!has_scales) return kernels::Format::stochastic_bfloat16;
  return is_signed ? kernels::Format::signed_blocks8 : kernels::Format::unsigned_blocks8;
}

/// Of a fused optimizer's call: moments that are float32 as yet, and that the domain wants quantised, are from now
/// on.
void quantise_moments(Call& call);

/// The same of one that was loaded, and that its optimizer calls `name`, so that it never takes float32's room.
void quantise_moment(const at::Tensor& moment, const std::string& name);

/// Whether an operator that needs their content has arguments that are quantised.
bool takes_quantised(const Call& call);

/// Does `run` for the call with what its quantised arguments stand for.
void run_dequantised(Call& call, c10::function_ref<void(Call&)> run);

}  // namespace zeropage
