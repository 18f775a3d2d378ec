// The update habit of one parameter: the operators that the last step deferred on it, and their numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "zeropage/base/backoff.h"
#include "zeropage/rules/deferred_program.h"
#include "zeropage/rules/speculation.h"

namespace zeropage {

/// Guesses one number ([Note: numbers] in speculation.h).
class NumberHabit {
 public:
  double next(const StepNumbers& numbers) const;
  /// Records its value in a step. False if next() would have guessed another.
  bool note(double value, const StepNumbers& numbers);

 private:
  std::uint64_t same_as_ = ~std::uint64_t{0};  // bits of the quantities that it always equalled
  double last_ = 0, change_ = 0;
  bool seen_ = false;
};

/// A program that updates a parameter. It may first widen the gradient and multiply it by factors; the rest uses the
/// result.
struct ParameterUpdate {
  std::vector<Instruction> rest;    // all except factors; an instruction that widens comes first.
  std::vector<double> numbers;      // of `rest`, in order.
  std::vector<std::size_t> making;  // indices of instructions that only make the gradient.
  bool all_factors_are_one = true;
  int gradient = -1;                    // slot of the tensor that backward made.
  std::vector<int> written;             // slots.
  StorageSegment* parameter = nullptr;  // the visible one.
};

/// Reads the program as an update; nullopt if it is anything else, or has numbers that cannot be compared.
std::optional<ParameterUpdate> as_update_of_parameter(const Program& program);

/// Whether two pieces of code do the same on corresponding slots, except for numbers. `same_slot` decides whether a
/// slot of `a` and one of `b` correspond.
bool same_code(c10::ArrayRef<Instruction> a, c10::ArrayRef<Instruction> b,
               c10::function_ref<bool(int, int)> same_slot);

/// The update that a step will probably defer.
struct ExpectedUpdate {
  std::shared_ptr<Program> program;
  std::vector<double> numbers;
  std::vector<StorageSegment*> written;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;  // keep the program's segments alive
};

class UpdateHabit {
 public:
  /// Learns from a program that ran, or would have run.
  void learn(const Program& program, const ParameterUpdate& update);
  /// Whether the next step's program can be guessed, and its early update is likely to be used.
  bool is_expected(EarlyUpdate when) const {
    return settled_ && (when == EarlyUpdate::always || (asleep_ && backoff_.is_over()));
  }
  /// The next step's update with its guessed numbers. nullopt if one of its tensors is gone or is itself deferred.
  std::optional<ExpectedUpdate> expected(const std::shared_ptr<Domain>& domain, StorageSegment& gradient,
                                         const StepNumbers& next) const;
  /// Whether its gradients are widened.
  bool widens() const { return code_.instructions[0].kind == Instruction::Kind::widen; }

  void hit() { backoff_.hit(); }
  void missed() { backoff_.missed(); }
  /// Records that it could not run early. It is tried again later, but not in each step, which would upset the plan.
  void refused() {
    runs_ahead = false;
    missed();
  }

  std::int64_t optimizer = -1;                 // its key; -1: note_step() has not named one.
  std::shared_ptr<const StepNumbers> numbers;  // of the last step.
  int arrivals = 0;                            // of gradients since the last step.
  int arrivals_a_step = 1;
  bool runs_ahead = false;  // the latest update ran early
  // Steps for which it still counts as a table that only lookups use. After a step in which something used it whole,
  // such as a checkpoint, it is tried once more.
  int only_looked_up = 0;
  static constexpr int kLookedUp = 2;

 private:
  struct Slot {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};  // if it `lasts`
    std::uint64_t address = 0;                                                                  // virtual
    at::Tensor shape;
    Access access = Access::read;
    bool lasts = false;
    std::size_t per = 1;
  };

  bool has_same_shape(const Program& program, const ParameterUpdate& update) const;

  std::vector<Slot> slots_;
  Program::Code code_;
  int gradient_ = -1;
  std::vector<int> written_;
  std::vector<NumberHabit> habits_;
  bool settled_ = false;  // all guesses for the last step were right.
  bool asleep_ = false;   // all factors of the last gradient were 1.
  Backoff backoff_;       // by steps.
};

}  // namespace zeropage
