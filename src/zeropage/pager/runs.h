// The runs of one cache, from their creation until nothing is under way for them any more; their ordinals in the
// plan; and what they take at home. Which tensors lie in a run, and how it gets its home, is HomeAllocator's.
//
// Contract: under the cache's lock; it never waits. A run that died stays until its last transfer has ended, and a
// frame of it until its last pin is dropped.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "zeropage/pager/frames.h"
#include "zeropage/pager/home.h"

namespace zeropage {

class Runs {
 public:
  Runs(Frames& frames, Budgets& budgets, Timeline& timeline)
      : frames_(frames), budgets_(budgets), timeline_(timeline) {}

  /// Of a run that has its home: its ordinal.
  void add(std::unique_ptr<Run> run);
  /// No tensor lies in it any more. It dies now, or when what is under way has ended.
  void let_die(Run& run);
  /// Of a dead run for which nothing is under way.
  void remove(Run& run);

  /// Null: dead, or not to be gathered ahead.
  Run* at(AccessPlan::Ordinal ordinal) const { return by_ordinal_[ordinal]; }
  /// Of the run that has or had the ordinal.
  std::size_t bytes_at(AccessPlan::Ordinal ordinal) const { return bytes_of_ordinal_[ordinal]; }
  /// The most bytes of all runs whose home is elsewhere.
  std::size_t pageable_peak() const { return pageable_peak_; }
  std::size_t home_bytes(int role, int tier) const { return home_bytes_[role][tier]; }
  std::size_t home_peak(int role, int tier) const { return home_peak_[role][tier]; }
  /// Bytes that lie in files which are only read.
  std::size_t source_bytes() const;
  /// Pages of living runs whose latest write home failed.
  std::size_t failed_pages() const { return failed_pages_; }
  void note_write(Page& page, bool failed) {
    failed_pages_ += failed - page.write_failed;
    page.write_failed = failed;
  }

  /// Of a closed cache: what lies at home counts no more; and homes are given back.
  void forget_home_bytes() noexcept;
  void give_back_homes() noexcept;
  /// In a forked child: nothing here is its own.
  void abandon() noexcept { new auto(std::move(runs_)); }

 private:
  bool shares_ordinal(const Run& run) const;
  void count_home(const Run& run, bool created);

  Frames& frames_;
  Budgets& budgets_;
  Timeline& timeline_;
  std::unordered_map<Run*, std::unique_ptr<Run>> runs_;
  std::vector<Run*> by_ordinal_;
  std::vector<std::size_t> bytes_of_ordinal_;
  std::size_t pageable_bytes_ = 0, pageable_peak_ = 0;
  std::size_t failed_pages_ = 0;
  std::size_t home_bytes_[kRoles][kTiers] = {};
  std::size_t home_peak_[kRoles][kTiers] = {};
};

}  // namespace zeropage
