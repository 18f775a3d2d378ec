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
// [Note: in time] A tensor that is large for the time that is spent on it, as an embedding is, cannot come within
// that time. Where what comes next, at the pace of the home, would be waited for, reading goes on while the home is
// idle beyond what the note above says, up to a third of memory.
//
// [Note: written before it must leave] A read that waits for its room to be written home takes twice the time. So
// while the window is full and the plan holds more reads, the cache writes the frames that will leave for them.
//
// Under the cache's lock; it never waits. The cache calls it when an operator has pinned or let go, and, where ranks
// need not agree, when a transfer has ended: so that one transfer starts the next while no thread waits.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "zeropage/pager/room.h"

namespace zeropage {

class ReadAhead {
 public:
  using Lock = Monitor::Lock;

  ReadAhead(Monitor& monitor, FrameMemory& memory, const Timeline& timeline, Frames& frames, Runs& runs,
            Transfers& transfers, Room& room, std::size_t page_bytes)
      : monitor_(monitor),
        memory_(memory),
        timeline_(timeline),
        frames_(frames),
        runs_(runs),
        transfers_(transfers),
        room_(room),
        page_bytes_(page_bytes) {}

  /// Starts what should be on its way. Gives the lock up only where a transfer of gathered tensors does.
  void run(Lock& lock);
  /// Goes on, if it rested for a thread that waited for memory, and no thread does now. Not on a device: uploads hold
  /// pages below that other threads may wait for.
  void resume(Lock& lock) {
    if (rested_ && !memory_.device()) run(lock);
  }
  /// The plan is another one.
  void restart();

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

  std::size_t window() const;
  bool hurries();
  bool would_be_late();
  bool may_bring(const Run& run) const;
  static bool reads(const Run& run, Access access);
  bool find_group();
  std::optional<Target> target();
  void advance();
  bool is_about_to_change(const Run& run) const;
  Result bring(const Target& target, Lock& lock);
  Result read(Run& run, std::size_t first_page, std::size_t pages, AccessPlan::Time time, Lock& lock);
  void write_behind(std::size_t most, Lock& lock);
  Result make_room(std::size_t bytes, AccessPlan::Time time, Lock& lock);
  void keep_room(std::int64_t bytes);

  struct Kept {
    std::uint64_t use;   // for which it is kept, or after which it is free, counted from the first
    std::int64_t bytes;  // kept; negative: will be free
  };

  Monitor& monitor_;
  FrameMemory& memory_;
  const Timeline& timeline_;
  Frames& frames_;
  Runs& runs_;
  Transfers& transfers_;
  Room& room_;
  const std::size_t page_bytes_;
  std::uint64_t group_ = 0;  // the first use of what is looked at, counted from the first
  std::vector<Member> members_;
  AccessPlan::Time begin_ = 0, end_ = 0;
  std::size_t steps_ = 0, step_ = 0, member_ = 0;
  std::deque<Kept> kept_;
  std::int64_t kept_bytes_ = 0;
  bool running_ = false;
  bool rested_ = false;                        // for a thread that waited for memory
  std::uint64_t asked_at_ = 0, asked_of_ = 0;  // uses and group_ when would_be_late() was asked
  bool late_ = false;                          // what it said
  std::uint64_t scan_ = 0;                     // how often it was asked
};

}  // namespace zeropage
