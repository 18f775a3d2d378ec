// The use of a cache's two budgets; [Note: one memory] in frame_cache.h tells what counts against which. FrameMemory
// keeps memory within its limit. This class limits what operators hold and what homes take. The cache's lock guards
// it.
#pragma once

#include <string>

#include "zeropage/pager/cache/frame_memory.h"

namespace zeropage {

class Budgets {
 public:
  /// `gathered`: for the cache of gathered tensors, which messages mention.
  Budgets(const FrameMemory& memory, std::size_t device_limit, std::size_t host_limit, bool gathered)
      : memory_(memory), device_limit_(device_limit), host_limit_(host_limit), gathered_(gathered) {}

  std::size_t device_limit() const { return device_limit_; }
  std::size_t host_limit() const { return host_limit_; }

  /// An operator begins or stops to hold `bytes`.
  void hold(std::size_t bytes) { held_bytes_ += bytes; }
  void let_go(std::size_t bytes) { held_bytes_ -= bytes; }
  std::size_t held_bytes() const { return held_bytes_; }
  /// Whether operators can hold `more` in addition.
  bool can_hold(std::size_t more) const { return held_bytes_ + homes_in(Tier::device) + more <= device_limit_; }
  /// Throws the BudgetError of operators that need `bytes` at once. `more`: the end of its message.
  [[noreturn]] void refuse(std::size_t bytes, const std::string& more = {}) const;
  /// The same for pages of `bytes`, when `in_use` are pinned.
  [[noreturn]] void refuse_pages(std::size_t bytes, std::size_t in_use, const std::string& more) const;

  /// A frame of `bytes` becomes a home, or ceases to be one.
  void add_home(Tier tier, std::size_t bytes) { permanent_bytes_[static_cast<int>(tier)] += bytes; }
  void remove_home(Tier tier, std::size_t bytes) { permanent_bytes_[static_cast<int>(tier)] -= bytes; }
  std::size_t homes_in(Tier tier) const { return permanent_bytes_[static_cast<int>(tier)]; }
  std::size_t all_homes() const { return homes_in(Tier::device) + homes_in(Tier::host) + homes_in(Tier::disk); }

  /// Updates the peaks; to be called after each change.
  void note_usage();
  /// Bytes of a budget: used now, used at the peak, and its limit.
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
