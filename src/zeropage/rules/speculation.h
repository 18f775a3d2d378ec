// Early updates: updates that run before the step requests them. With clipping by the global norm, an optimizer can
// update only after backward, so its disk traffic would overlap with the next forward alone. But a step nearly always
// defers the last step's operators on a parameter, with other numbers. The update can run during backward, as soon as
// the gradient is final, as if no gradient were clipped. It writes shadow copies (pager/homes/versions.h), which
// nothing else can see. settle_update() then compares the operators that the step has deferred, operator by operator
// and number by number. If they are the same, and each factor of the gradient is exactly 1, the copies become the
// content. Else they are discarded, and the operators run as usual.
//
// [Note: numbers] A number is guessed from its past. If it always equalled a quantity of the optimizer, it follows
// that quantity; Python gives learning rate, step, 1 - beta1 ** step, …. Else it changes by the same amount in each
// step. A parameter is updated early only while all guesses for it were right.
//
// [Note: left to forward] If all updates run in backward, the disk may have too much to do there and nothing in
// forward. Some are then left to the step's program (update_balance.h). A parameter whose rows are looked up, and
// that no operator needs whole, is always left: until its next gradient comes, its program runs where the disk has
// time.
//
// [Note: ahead over ranks] Over ranks, a rank updates its shares once it has delivered a parameter's last mean. Each
// rank decides by its own disk and memory, so gathers must not depend on it. The update therefore leaves gathered
// tensors alone. A rank that gathers a parameter with an open version sends what the parameter is until the step
// (pager/homes/sharded_home). Frames that the program would have dropped are dropped where it would have run
// ([Note: where ranks update alike] in program.cpp).
//
// Early updates run only on the CPU, without a device that has its own memory; over ranks, only where parameters,
// gradients and states are all partitioned. The tensors must have their home on disk and share no page.
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

/// Sets the callback that gives an optimizer's numbers for the next step, by its key. We call it without a lock.
void set_next_numbers(std::function<StepNumbers(std::int64_t optimizer)> next);

/// Counts a gradient of `leaf`. True if it is probably the last one before the step, and early_update() shall follow.
/// `was_deferred`: until this gradient came, its update was deferred, so no operator needed the whole parameter.
bool note_arrival(StorageSegment& leaf, bool was_deferred);
/// Whether the gradient of `leaf` that came last probably ends the sum of this step.
bool ends_sum(const StorageSegment& leaf);
/// Notes that no operator since the step needed the whole of a parameter: lookups previewed its rows (preview.h), and
/// the deferred update has ended in between operators. Needs the domain's deferral_mutex.
void note_only_looked_up(const std::shared_ptr<void>& update_habit);
/// Runs the update that the step will probably request, after the leaf's last gradient.
void early_update(StorageSegment& leaf, const at::Tensor& gradient);

/// Learns the numbers that an optimizer had in a step over these parameters. `optimizer`: its key.
void note_step(c10::ArrayRef<at::Tensor> parameters, std::int64_t optimizer, StepNumbers numbers);
/// Drops shadow copies of the program's segments. Called before the program walks over them.
void discard_ahead(const Program& program);
/// Takes or drops the early update of a complete program, and learns from the program. Program::settle calls it.
void settle_update(Program& program);

}  // namespace zeropage
