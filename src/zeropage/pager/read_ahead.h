// What a cache does before it is asked: along the plan, it reads what will be needed and keeps room for what will be
// created or overwritten. The next page that is missing comes first; the page whose next use is furthest leaves for
// it (of equal ones that whose leaving causes fewer transfers); and none leaves for a page that is used later than
// itself (Cao, Felten, Karlin and Li, "A study of integrated prefetching and caching strategies", 1995).
//
// [Note: how far ahead] Who leaves is best decided late: of 12 pages used in turn, 6 of which fit, 6.5 are read in
// each turn if each is read when it is needed, and all 12 if as early as can be, since then memory always holds the
// next six. So what has been read and not been used, and the room that is kept, are at most an eighth of memory, and
// a sixteenth of what memory lacks: the less is missing, the less the disk has to do.
//
// [Note: written before it must leave] A read that waits for its room to be written home takes twice the time. So
// while the window is full and the plan holds more reads, the cache writes the frames that will leave for them.
//
// Under the cache's lock; it never waits. The cache calls it when an operator has pinned or let go, and, where ranks
// need not agree, when a transfer has ended: so that one transfer starts the next while no thread waits.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "zeropage/pager/access_plan.h"

namespace zeropage {

class FrameCache;

class ReadAhead {
 public:
  void run(FrameCache& cache, std::unique_lock<std::mutex>& lock);
  /// The plan is another one.
  void restart(FrameCache& cache);

 private:
  struct Member {
    AccessPlan::Use use;
    std::size_t pages, bytes;
  };
  struct Target {
    const Member* member;
    std::size_t first_page, pages;
    AccessPlan::Time time;
  };
  enum class Result { there, blocked };

  static std::size_t window(const FrameCache& cache);
  bool find_group(const FrameCache& cache);
  std::optional<Target> target(const FrameCache& cache);
  void advance();
  Result bring(FrameCache& cache, const Target& target, std::unique_lock<std::mutex>& lock);
  Result read(FrameCache& cache, Run& run, std::size_t first_page, std::size_t pages, AccessPlan::Time time,
              std::unique_lock<std::mutex>& lock);
  void write_behind(FrameCache& cache, std::size_t most, std::unique_lock<std::mutex>& lock);
  Result make_room(FrameCache& cache, std::size_t bytes, AccessPlan::Time time, std::unique_lock<std::mutex>& lock);
  void keep_room(std::int64_t bytes);

  struct Room {
    std::uint64_t use;   // for which it is kept, or after which it is free, counted from the first
    std::int64_t bytes;  // kept; negative: will be free
  };

  std::uint64_t group_ = 0;  // the first use of what is looked at, counted from the first
  std::vector<Member> members_;
  AccessPlan::Time begin_ = 0, end_ = 0;
  std::size_t steps_ = 0, step_ = 0, member_ = 0;
  std::deque<Room> kept_;
  std::int64_t kept_bytes_ = 0;
  bool running_ = false;
};

}  // namespace zeropage
