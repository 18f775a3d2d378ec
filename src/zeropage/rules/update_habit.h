// What is known of one parameter's updates: what the last step deferred, and what its numbers were.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "zeropage/base/backoff.h"
#include "zeropage/rules/deferred_program.h"
#include "zeropage/rules/speculation.h"

namespace zeropage {

/// [Note: numbers] of speculation.h, of one number.
class NumberHabit {
 public:
  double next(const StepNumbers& numbers) const;
  /// What it was in a step. False if that was not to be expected.
  bool note(double value, const StepNumbers& numbers);

 private:
  std::uint64_t same_as_ = ~std::uint64_t{0};  // quantities that it was equal to each time, as bits
  double last_ = 0, change_ = 0;
  bool seen_ = false;
};

/// A program that is an update: the gradient is widened, or not, and multiplied with factors; the rest takes it from
/// there.
struct ParameterUpdate {
  std::vector<Instruction> rest;    // all but factors; first what widens, if there is one
  std::vector<double> numbers;      // of these, in order
  std::vector<std::size_t> making;  // indices of instructions that only make the gradient
  bool all_factors_are_one = true;
  int gradient = -1;                    // slot: what backward made
  std::vector<int> written;             // slots
  StorageSegment* parameter = nullptr;  // that operators see
};

/// The update that the program is; nullopt if it is anything else, or has numbers that cannot be compared.
std::optional<ParameterUpdate> as_update_of_parameter(const Program& program);

/// Whether two pieces of code do the same on slots that correspond, but for numbers. `same_slot` tells of a slot of
/// `a` and one of `b` that would.
bool same_code(c10::ArrayRef<Instruction> a, c10::ArrayRef<Instruction> b,
               c10::function_ref<bool(int, int)> same_slot);

/// What a step will probably defer.
struct ExpectedUpdate {
  std::shared_ptr<Program> program;
  std::vector<double> numbers;
  std::vector<StorageSegment*> written;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;  // which keep the program's segments
};

class UpdateHabit {
 public:
  /// The program ran, or would have.
  void learn(const Program& program, const ParameterUpdate& update);
  /// Whether the next step's program can be told, and is likely to be taken.
  bool is_expected(EarlyUpdate when) const {
    return settled_ && (when == EarlyUpdate::always || (asleep_ && backoff_.is_over()));
  }
  /// It, with the numbers that are expected. nullopt if a tensor of it is gone or has yet to be written itself.
  std::optional<ExpectedUpdate> expected(const std::shared_ptr<Domain>& domain, StorageSegment& gradient,
                                         const StepNumbers& next) const;
  /// Whether its gradients are widened.
  bool widens() const { return code_.instructions[0].kind == Instruction::Kind::widen; }

  void hit() { backoff_.hit(); }
  void missed() { backoff_.missed(); }
  /// It could not run ahead: it is tried again later, and not in each step, for the plan's sake.
  void refused() {
    runs_ahead = false;
    missed();
  }

  std::int64_t optimizer = -1;                 // its key; -1: it has not told of a step
  std::shared_ptr<const StepNumbers> numbers;  // in the last step
  int arrivals = 0;                            // of gradients since the last step
  int arrivals_a_step = 1;
  bool runs_ahead = false;  // the latest did

 private:
  struct Slot {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};  // of what lasts
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
  bool settled_ = false;  // the last numbers were to be expected
  bool asleep_ = false;   // nothing multiplied the last gradient
  Backoff backoff_;       // by steps
};

}  // namespace zeropage
