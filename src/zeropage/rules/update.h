// Programs that are one optimizer's update, which kernels/update runs in a single loop: scaling of the gradient, a
// fused optimizer operator, and copies of the parameter to its low-precision copy.
#pragma once

#include <optional>

#include "zeropage/kernels/update.h"
#include "zeropage/rules/program.h"

namespace zeropage {

struct UpdateProgram {
  kernels::Update update;
  int parameter = -1, gradient = -1, visible = -1;  // slots; -1: none
  int narrow = -1;                                  // the gradient is widened from it.
  int high = -1, low = -1;                          // the parameter is joined from and split into these.
  int state[3] = {-1, -1, -1};
  struct Quantised {
    int codes = -1, scales = -1;  // slots
    kernels::Format format = kernels::Format::none;
    std::uint32_t seed = 0;
  } quantised[3];  // by state: its codes
};

/// Reads the instructions as an update, in float32 on the CPU; nullopt if they are anything else. `dtype_of` gives
/// slots' dtypes.
std::optional<UpdateProgram> as_update(c10::ArrayRef<Instruction> instructions,
                                       c10::function_ref<c10::ScalarType(int)> dtype_of);

/// Runs it on one slice for each slot; an absent slot has an undefined tensor. Returns the number of gradient values
/// that are not finite.
std::size_t run_update(const UpdateProgram& program, c10::ArrayRef<at::Tensor> registers);

}  // namespace zeropage
