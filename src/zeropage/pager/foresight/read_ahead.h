// Prefetching. Along the plan, the cache reads pages before they are needed, and keeps room for pages that will be
// created or overwritten. The next missing page comes first. It evicts the page whose next use is furthest; of equal
// ones, the page whose eviction causes fewer transfers. No page leaves for one that is used later than itself (Cao,
// Felten, Karlin and Li, "A study of integrated prefetching and caching strategies", 1995).
//
// [Note: how far ahead] Victims are best chosen late. Take 12 pages used in turn, with room for 6. Reading each page
// when it is needed costs 6.5 reads a turn. Reading as early as possible costs 12, since memory then always holds the
// next six. Pages read but not used, plus kept room, are therefore limited to an eighth of memory, and to a sixteenth
// of the missing memory. The less memory is missing, the fewer reads are needed.
//
// [Note: in time] A tensor can be too large to read during the time the program spends before it, such as an
// embedding. If the home's pace would make the program wait for the next pages, reading goes beyond the limit above,
// up to a third of memory, while the home is idle.
//
// [Note: written before it must leave] A read takes twice the time if it waits for its room to be written home. While
// the window is full and the plan holds more reads, the cache writes the next victims home.
//
// [Note: lasting streams] An update that no operator waits for walks over its tensors between other operators. It
// takes a window only if the pages are in memory. ReadAhead reads its next pages while the home has little to do,
// after those of the plan. Unused ones are at most the window above, or two pages of each tensor. A page that the
// walk uses sooner than another page's next use does not leave for it.
//
// Under the cache's lock; it never waits. The cache calls it when an operator has pinned or unpinned. If ranks need
// not agree, it also calls it when a transfer has ended, so that transfers start the next while no thread waits.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "zeropage/pager/cache/room.h"

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

  /// The most bytes that are read ahead, where the program would wait otherwise ([Note: in time]).
  std::size_t most_ahead() const { return memory_.budget().limit() / 3; }
  /// Starts the transfers that are due. Gives the lock up only where a transfer of gathered tensors does.
  void run(Lock& lock);
  /// The runs among the next uses that expect a change, a little further than it reads ahead.
  std::vector<Run*> changes() const;
  /// Restarts after a change of plan.
  void restart();
  /// Begins and ends a lasting stream over these segments.
  void open_stream(std::span<const PinRequest> requests);
  void close_stream(const Run& run) noexcept;
  /// Puts the run's stream before all others.
  void hurry_stream(const Run& run) noexcept;
  /// The walk has taken the run's pages before this one. `begun`: and a part of this one.
  void reach_in_stream(Run& run, std::size_t page, bool begun) noexcept;

 private:
  struct Member {
    AccessPlan::Use use;
    std::size_t pages, bytes;
  };
  struct Streamed {
    Run* run;
    Access access;
    bool begun = false;       // the walk has taken a part of the next page
    std::size_t reads = 0;    // without progress of the walk, since `group`
    std::uint64_t group = 0;  // the plan's, by its number
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
  void read_planned(Lock& lock);
  void read_streams(Lock& lock);
  Result read_stream(std::vector<Streamed>& stream, std::size_t& left, Lock& lock);

  struct Kept {
    std::uint64_t use;   // number of the use it is kept for, or after which it is free
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
  std::uint64_t group_ = 0;  // number of the first use of the group that is looked at
  std::vector<Member> members_;
  AccessPlan::Time begin_ = 0, end_ = 0;
  std::size_t steps_ = 0, step_ = 0, member_ = 0;
  std::deque<Kept> kept_;
  std::int64_t kept_bytes_ = 0;
  bool running_ = false;
  std::uint64_t asked_at_ = 0, asked_of_ = 0;   // uses and group_ at the last would_be_late()
  bool late_ = false;                           // its result
  std::uint64_t scan_ = 0;                      // its number of calls
  std::vector<std::vector<Streamed>> streams_;  // lasting ones, in the order of their reads
};

}  // namespace zeropage
