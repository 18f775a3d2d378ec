// Memory for new frames, and eviction when memory is short. The bytes that an operator pins were granted to it
// (grants.h), so only frames that nothing holds must leave. Freed bytes go to the oldest demand; prefetches use what
// is left. make_frame() shows how demanded bytes wait for memory; read_ahead.cpp shows it for bytes that are read
// ahead.
//
// Contract: under the cache's lock, which it gives up while a thread waits. A dirty frame leaves only after its write
// has succeeded.
#pragma once

#include <list>

#include "zeropage/pager/cache/grants.h"
#include "zeropage/pager/cache/transfers.h"

namespace zeropage {

/// No memory can be freed. Distinct from a BudgetError of a home below.
struct Shortage {};

class Room {
 public:
  using Lock = Monitor::Lock;

  Room(Monitor& monitor, FrameMemory& memory, const Timeline& timeline, Frames& frames, Transfers& transfers,
       Grants& grants)
      : monitor_(monitor),
        memory_(memory),
        timeline_(timeline),
        frames_(frames),
        transfers_(transfers),
        grants_(grants) {}

  /// A frame with one pin. Waits for transfers. Throws Shortage if no frame is left that could leave, DiskError if a
  /// frame that should leave cannot be written.
  Frame& make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages, bool for_long = false);
  /// The same without waiting: evicts only clean frames that are used later than `before`. Null if that is not
  /// enough, or if threads wait for these bytes.
  Frame* try_make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages, AccessPlan::Time before);
  /// Bytes that threads wait for. Reading ahead leaves them free. None over ranks, where prefetches must not depend
  /// on threads.
  std::size_t demanded_bytes() const;

  /// Evicts every frame that can leave. Throws DiskError.
  void empty(Lock& lock);
  /// Writes the run's newer frames home, and drops its frames. Pinned ones stay. Throws DiskError.
  void give_up_frames(Lock& lock, Run& run);
  /// Without a plan, once memory is short: keeps the next victims' writes in flight.
  void clean_behind(Lock& lock) noexcept;

 private:
  struct Making;
  // Each returns true if it did something or waited, so that a new attempt can succeed.
  bool give_up_clean(const Making& making);
  bool clear_neighbours(Lock& lock, Making& making);
  bool send_victim_home(Lock& lock, const Making& making);
  bool wait_for_gather(Lock& lock);
  bool wait_for_transfers(Lock& lock, const Making& making);
  bool wait_for_turn(Lock& lock, const Making& making);
  bool clear_window(std::size_t bytes, AccessPlan::Time before, bool clean_only, Lock& lock);

  Monitor& monitor_;
  FrameMemory& memory_;
  const Timeline& timeline_;
  Frames& frames_;
  Transfers& transfers_;
  Grants& grants_;
  std::list<const Making*> demands_;  // oldest first
};

}  // namespace zeropage
