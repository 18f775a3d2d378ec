// The runs of one cache, from creation until nothing is in flight for them; their ordinals in the plan; and the bytes
// they take at home. HomeAllocator decides which tensors share a run and how a run gets its home.
//
// Contract: under the cache's lock; it never waits. A dead run stays until its last transfer has ended, and its frame
// until its last pin is dropped.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "zeropage/pager/cache/frames.h"
#include "zeropage/pager/homes/home.h"

namespace zeropage {

class Runs {
 public:
  Runs(Frames& frames, Budgets& budgets, Timeline& timeline)
      : frames_(frames), budgets_(budgets), timeline_(timeline) {}

  /// Adds a run that has its home, and gives it an ordinal. If it throws, the caller still has the run, whose frames
  /// have left it.
  void add(std::unique_ptr<Run>&& run);
  /// Lets a run without tensors die, now or once its transfers have ended.
  void let_die(Run& run);
  /// Deletes a dead run that has no transfer in flight.
  void remove(Run& run);

  /// Null: the run is dead, or must not be gathered ahead.
  Run* at(AccessPlan::Ordinal ordinal) const { return by_ordinal_[ordinal]; }
  /// Bytes of the run that has or had the ordinal.
  std::size_t bytes_at(AccessPlan::Ordinal ordinal) const { return bytes_of_ordinal_[ordinal]; }
  /// The peak of all bytes whose home is not a frame.
  std::size_t pageable_peak() const { return pageable_peak_; }
  std::size_t home_bytes(int role, int tier) const { return home_bytes_[role][tier]; }
  std::size_t home_peak(int role, int tier) const { return home_peak_[role][tier]; }
  /// Bytes at home in files that are only read.
  std::size_t source_bytes() const;
  /// Pages of living runs whose latest write home failed.
  std::size_t failed_pages() const { return failed_pages_; }
  void note_write(Page& page, bool failed) {
    failed_pages_ += failed - page.write_failed;
    page.write_failed = failed;
  }

  /// After close(): stop counting home bytes, and release the homes.
  void forget_home_bytes() noexcept;
  void give_back_homes() noexcept;
  /// In a forked child, which owns nothing here.
  void abandon() noexcept { new auto(std::move(runs_)); }

 private:
  bool shares_ordinal(const Run& run) const;
  void leave_frames(Run& run) noexcept;
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
