// The placement of a tensor: whether ranks hold the same value. It belongs to the data, as DTensor's placements do,
// and decides where an operator may run:
//
// - placement | the value                             | DTensor   | where it is
// - same      | one, on every rank                    | Replicate | whole on each rank, or a share on each (Layout)
// - own       | each rank has its own                 | none      | whole on each rank
// - sum       | the mean of the ranks' values, to do  | Partial   | nowhere yet: the reducer brings it (Pending)
//
// A result is `same` if all its inputs are. Only then may each rank compute its share alone.
//
// - an operator's input                 | in an optimizer's step, in a scope | elsewhere
// - a paged tensor                      | its placement                      | its placement
// - an ordinary tensor, a Python number | same                               | own
// - random numbers                      | same                               | own
//
// - an operator's output                | afterwards
// - a parameter, an optimizer's state   | same: a contract with the program, which sampled checks enforce
// - a gradient that ranks have summed   | same if everything else is same or a number; else own, and summed again
// - anything else                       | own if any input is own; else as it was
//
// A tensor that becomes own is whole on each rank from then on.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace zeropage {

enum class Placement : std::uint8_t { same, own, sum };

/// Marks an optimizer's step on this thread while it lives: the values it computes with are the same on all ranks.
class StepScope {
 public:
  StepScope();
  ~StepScope();
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;
};

/// Marks this thread as outside any step while it lives: the closure that a step calls computes as training does.
class OutsideSteps {
 public:
  OutsideSteps();
  ~OutsideSteps();
  OutsideSteps(const OutsideSteps&) = delete;
  OutsideSteps& operator=(const OutsideSteps&) = delete;

 private:
  int outer_;
};

/// Marks values on this thread as the same on all ranks while it lives. `all_ranks`: all ranks also make the same
/// tensors.
class SameValues {
 public:
  explicit SameValues(bool all_ranks = true);
  ~SameValues();
  SameValues(const SameValues&) = delete;
  SameValues& operator=(const SameValues&) = delete;

 private:
  bool all_ranks_;
};

/// Whether all ranks make the same tensors here, so that they can count them.
bool makes_what_all_ranks_make();

/// Says that StepScope announces steps from now on; Python calls it. Until then, operators outside of autograd and of
/// backward count as a step's, because torch::optim has no hooks.
void announce_steps();

/// Whether ordinary tensors and numbers are the same on all ranks here. They are in an optimizer's step and in an
/// init scope, but not in a closure's forward and backward.
bool values_are_same();

/// Numbers and samples of the tensors that this rank wrote under the contract since ranks last compared theirs.
class ContractLog {
 public:
  struct Entry {
    std::uint64_t number;  // of the tensor that was written
    double value;
    std::string what;  // the operator and the tensor, for an error
  };

  /// Counts a write of a parameter that is no copy. All ranks have written as often when all backwards have ended.
  void count(std::string_view operator_name);
  /// Counts a write. True if it is one to check.
  bool samples() { return ++writes_ <= kAlways || writes_ % kEvery == 0; }
  void note(std::uint64_t number, double value, std::string what);
  struct Taken {
    std::uint64_t hash;  // of the entries and of the count so far; the same on ranks that wrote the same
    std::string text;    // both, one entry a line, for ranks to compare
  };
  /// Removes the entries. The count goes on.
  Taken take();
  /// Describes what each rank wrote at the first entry that differs by more than rounding. If all have ended their
  /// backward, also at the first that not all have, and how often each wrote parameters, if that differs. Empty:
  /// nothing differs.
  static std::string difference(const std::vector<std::string>& texts, bool have_ended);

 private:
  static constexpr std::uint64_t kAlways = 256, kEvery = 61;
  static constexpr std::size_t kMostEntries = 64;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::uint64_t writes_ = 0;
  std::uint64_t of_parameters_ = 0;
  std::string last_of_parameter_ = "no operator";
};

}  // namespace zeropage
