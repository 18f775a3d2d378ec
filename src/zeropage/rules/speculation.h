// Updates ahead of the step. With clipping by the global norm, an optimizer knows only when backward is over what to
// do; so its traffic to the disk would lie under the next forward alone. But what a step will defer on a parameter is
// nearly always what the last one deferred, with other numbers: so the update runs as soon as the gradient is final,
// under backward, as if no gradient were clipped, into second versions of all that it writes (pager/versions.h),
// which nothing else can see. When the step has deferred its operators they are compared, operator by operator and
// number by number. If they are the same, and each factor of the gradient is exactly 1, the versions become the
// content; else they are dropped, and the operators run as without this.
//
// [Note: numbers] What a number will be is guessed from what it was: the same quantity of the optimizer as always so
// far (learning rate, step, 1 - beta1 ** step, …, which Python tells), else one that changes by the same amount in
// each step. A parameter is updated ahead only while all of its numbers were guessed right.
//
// Ahead run updates in one process, without a device that has memory of its own, of tensors that share no page and
// whose content is at home on disk.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

class Program;

/// An optimizer's quantities in one step.
using StepNumbers = std::vector<double>;

/// How to ask for what they will be in the next step, by the optimizer's own key. Called with no lock held.
void set_next_numbers(std::function<StepNumbers(std::int64_t optimizer)> next);

/// A gradient of `leaf` has come. True if, as steps went so far, it is the last one before the step.
bool note_arrival(StorageSegment& leaf);
/// Runs the update that the step will probably ask for, of a leaf whose last gradient came.
void early_update(StorageSegment& leaf, const at::Tensor& gradient);

/// An optimizer's step over these parameters is over, in which it had these numbers. `optimizer`: its key.
void note_step(c10::ArrayRef<at::Tensor> parameters, std::int64_t optimizer, StepNumbers numbers);
/// Drops what was written ahead to any of the program's segments. Before it walks over them.
void discard_ahead(const Program& program);
/// The program is whole: takes or drops what was written ahead of it, and learns from it. Program::settle calls it.
void settle_update(Program& program);

}  // namespace zeropage
