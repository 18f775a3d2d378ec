// Memory: what it is given to, and what leaves when it is short. Where bytes wait that have been asked for, and have
// no memory, is read in make_frame; for those that have not been asked for, in read_ahead.cpp.
//
// Contract: under the cache's lock, which is given up while a thread waits. What is dirty leaves only after its write
// has succeeded.
#pragma once

#include "zeropage/pager/transfers.h"
#include "zeropage/pager/upper_cache.h"

namespace zeropage {

/// Memory cannot be had: told apart from a BudgetError of a home below.
struct Shortage {};

class Room {
 public:
  using Lock = Monitor::Lock;

  Room(Monitor& monitor, FrameMemory& memory, const Timeline& timeline, Frames& frames, Transfers& transfers,
       UpperCache& upper)
      : monitor_(monitor),
        memory_(memory),
        timeline_(timeline),
        frames_(frames),
        transfers_(transfers),
        upper_(upper) {}

  /// A frame with one pin. Waits for what must be written, and for what other threads hold. Throws Shortage if
  /// nothing is left that could leave, DiskError if what should leave cannot be written.
  Frame& make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages, bool permanent = false);
  /// The same without waiting; what leaves is clean and used later than `before`. Null if that is not enough, or
  /// is_demanded().
  Frame* try_make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages, AccessPlan::Time before);
  /// A thread is in make_frame or empty. What it has freed it needs, so nothing is brought ahead: as one transfer's
  /// end starts the next, that could go on for ever. Not over ranks, where what is brought must not depend on
  /// threads.
  bool is_demanded() const { return demands_ > 0 && !frames_.is_gathered(); }

  /// Everything that can leave does. Throws DiskError.
  void empty(Lock& lock);
  /// Writes what is newer in frames home, and drops them. Pinned ones stay. Throws DiskError.
  void give_up_frames(Lock& lock, Run& run);
  /// Where there is no plan: once memory is short, what would leave next is kept on its way home.
  void clean_behind(Lock& lock) noexcept;

 private:
  struct Making;
  // Each returns whether it did something, or waited, so that it is worth while to try again.
  bool give_up_clean(const Making& making);
  bool clear_neighbours(Lock& lock, Making& making);
  bool send_victim_home(Lock& lock, const Making& making);
  bool wait_for_gather(Lock& lock);
  bool wait_for_transfers(Lock& lock, const Making& making);
  bool tidy_above(Lock& lock);
  bool wait_for_pins(Lock& lock, Making& making);
  bool clear_window(std::size_t bytes, AccessPlan::Time before, bool clean_only, Lock& lock);

  Monitor& monitor_;
  FrameMemory& memory_;
  const Timeline& timeline_;
  Frames& frames_;
  Transfers& transfers_;
  UpperCache& upper_;
  int demands_ = 0;  // threads in make_frame or empty
};

}  // namespace zeropage
