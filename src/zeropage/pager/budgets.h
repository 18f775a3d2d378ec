// What of a cache's two budgets is used. [Note: one memory] in frame_cache.h says what counts against which. That
// memory is never exceeded is FrameMemory's; here is what operators may hold, and homes may take. The cache's lock
// guards it.
#pragma once

#include <string>

#include "zeropage/pager/frame_memory.h"

namespace zeropage {

class Budgets {
 public:
  /// `gathered`: of the cache of gathered tensors. Messages say so.
  Budgets(const FrameMemory& memory, std::size_t device_limit, std::size_t host_limit, bool gathered)
      : memory_(memory), device_limit_(device_limit), host_limit_(host_limit), gathered_(gathered) {}

  std::size_t device_limit() const { return device_limit_; }
  std::size_t host_limit() const { return host_limit_; }

  /// An operator holds `bytes`, and no longer.
  void hold(std::size_t bytes) { held_bytes_ += bytes; }
  void let_go(std::size_t bytes) { held_bytes_ -= bytes; }
  std::size_t held_bytes() const { return held_bytes_; }
  /// Whether operators can hold `more` beside what they do.
  bool can_hold(std::size_t more) const { return held_bytes_ + homes_in(Tier::device) + more <= device_limit_; }
  /// Throws the BudgetError of operators that need `bytes` at once.
  [[noreturn]] void refuse(std::size_t bytes) const;

  /// A frame of `bytes` is a home, and no longer.
  void add_home(Tier tier, std::size_t bytes) { permanent_bytes_[static_cast<int>(tier)] += bytes; }
  void remove_home(Tier tier, std::size_t bytes) { permanent_bytes_[static_cast<int>(tier)] -= bytes; }
  std::size_t homes_in(Tier tier) const { return permanent_bytes_[static_cast<int>(tier)]; }

  /// After each change: for the peaks.
  void note_usage();
  /// What of a budget is used, at most was, and can be.
  struct Usage {
    std::string name;
    std::size_t now, peak, limit;
  };
  Usage usage(Pool pool) const;

 private:
  std::size_t device_bytes() const;

  const FrameMemory& memory_;
  const std::size_t device_limit_, host_limit_;
  const bool gathered_;
  std::size_t held_bytes_ = 0;                // by operators
  std::size_t permanent_bytes_[kTiers] = {};  // of frames that are homes
  std::size_t device_peak_ = 0, host_peak_ = 0;
};

}  // namespace zeropage
