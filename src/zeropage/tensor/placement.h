// What ranks know of a tensor's value. It belongs to the data, as DTensor's placements do, and decides where an
// operator may run:
//
//   placement | the value                             | DTensor   | where it is
//   same      | one, on every rank                    | Replicate | whole on each rank, or a share on each (Layout)
//   own       | each rank has its own                 | none      | whole on each rank
//   sum       | the mean of what ranks have, not made | Partial   | nowhere yet: the reducer brings it (Pending)
//
// A result is `same` if all that it is made of is, and only then each rank may compute its share of it alone.
//
//   what an operator takes              | in an optimizer's step, in a scope | elsewhere
//   a paged tensor                      | as it says                         | as it says
//   an ordinary tensor, a Python number | same                               | own
//   random numbers                      | same                               | own
//
//   what it writes                      | afterwards
//   a parameter, an optimizer's state   | same: a contract with the program, which a sampled check sees to
//   a gradient that ranks have summed   | same if everything else is same or a number; else own, and summed anew
//   anything else                       | own if anything that it takes is own; else as it was
//
// A tensor that becomes own is whole on each rank from then on.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace zeropage {

enum class Placement : std::uint8_t { same, own, sum };

/// While it lives, this thread runs an optimizer's step: what it computes with is the same on all ranks.
class StepScope {
 public:
  StepScope();
  ~StepScope();
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;
};

/// While it lives, this thread is in no step: in the closure that a step calls, which computes as training does.
class OutsideSteps {
 public:
  OutsideSteps();
  ~OutsideSteps();
  OutsideSteps(const OutsideSteps&) = delete;
  OutsideSteps& operator=(const OutsideSteps&) = delete;

 private:
  int outer_;
};

/// While it lives, they are the same on this thread in any case. `all_ranks`: and all ranks make the same tensors.
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

/// Steps are announced by StepScope from now on, as Python does. Until then, operators outside of autograd and of
/// backward count as a step's, since torch::optim has no hooks.
void announce_steps();

/// Whether ordinary tensors and numbers are the same on all ranks here: in an optimizer's step or an init scope, but
/// not in a closure's forward and backward.
bool values_are_same();

/// Numbers and samples of tensors that this rank wrote by contract since ranks last compared theirs.
class ContractLog {
 public:
  struct Entry {
    std::uint64_t number;  // of the tensor that was written
    double value;
    std::string what;  // the operator and the tensor, for an error
  };

  /// Whether the next write is one of those that are checked.
  bool samples() { return ++writes_ <= kAlways || writes_ % kEvery == 0; }
  void note(std::uint64_t number, double value, std::string what);
  /// Of the entries so far; the same on ranks that wrote the same.
  std::uint64_t hash() const;
  /// The entries as text, one a line, for ranks to compare.
  std::string text() const;
  void clear();
  /// Where texts of ranks differ by more than rounding: what each rank wrote, in words; empty: nowhere.
  static std::string difference(const std::vector<std::string>& texts);

 private:
  static constexpr std::uint64_t kAlways = 256, kEvery = 61;
  static constexpr std::size_t kMostEntries = 64;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::uint64_t writes_ = 0;
};

}  // namespace zeropage
