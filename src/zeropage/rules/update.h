// Programs that are one optimizer's update, which kernels/update does in a single loop: what scales the gradient, a
// fused optimizer operator, and copies of the parameter to what operators see of it.
#pragma once

#include <optional>

#include "zeropage/kernels/update.h"
#include "zeropage/rules/program.h"

namespace zeropage {

struct UpdateProgram {
  kernels::Update update;
  int parameter = -1, gradient = -1, visible = -1;  // slots; -1: none
  int narrow = -1;                                  // what the gradient is widened from
  int high = -1, low = -1;                          // of a parameter that is joined from these and split into them
  int state[3] = {-1, -1, -1};
  struct Quantised {
    int codes = -1, scales = -1;  // slots
    kernels::Format format = kernels::Format::none;
    std::uint32_t seed = 0;
  } quantised[3];  // by state: what it is dequantised from and encoded to
};

/// The update that the instructions are, in float32 on the CPU; nullopt if they are anything else. `dtype_of` tells
/// slots' dtypes.
std::optional<UpdateProgram> as_update(c10::ArrayRef<Instruction> instructions,
                                       c10::function_ref<c10::ScalarType(int)> dtype_of);

/// Runs it on one slice a slot. Slots that are not there have no tensor.
std::size_t run_update(const UpdateProgram& program, c10::ArrayRef<at::Tensor> registers);

}  // namespace zeropage
