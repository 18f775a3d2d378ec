// Chooses the run of a new segment, and the home of that run. A large tensor has a run of its own; small ones share a
// page. In one process a small tensor may reuse the slot of a dead one; over ranks no slot is used twice.
//
// Contract: under the cache's lock, which it gives up while it waits for memory or calls a lower cache. If it throws,
// no run was made.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "zeropage/comm/ranks.h"
#include "zeropage/pager/cache/grants.h"
#include "zeropage/pager/cache/room.h"

namespace zeropage {

class FrameCache;

/// The homes of runs, other than frames. Null: there is none.
struct Homes {
  Home* home;                          // for runs without a frame of their own.
  SwapFile* swap;                      // set if that home is a disk.
  FrameCache* lower;                   // set if it is a cache below, or ranks' shares.
  Ranks* ranks;                        // null except in the cache of gathered tensors.
  std::optional<Tier> secondary = {};  // of a gathered parameter's secondary partition; none: it has none
};

class HomeAllocator {
 public:
  using Lock = Monitor::Lock;

  HomeAllocator(Monitor& monitor, FrameMemory& memory, Budgets& budgets, Frames& frames, Runs& runs,
                Transfers& transfers, Grants& grants, Room& room, const Homes& homes, std::size_t page_bytes)
      : monitor_(monitor),
        memory_(memory),
        budgets_(budgets),
        frames_(frames),
        runs_(runs),
        transfers_(transfers),
        grants_(grants),
        room_(room),
        homes_(homes),
        page_bytes_(page_bytes) {}

  /// A run with room for a segment, at `offset`. Throws BudgetError, DiskError, ConfigError.
  Run& run_for(Lock& lock, const SegmentSpec& spec, std::size_t& offset);
  Run& gathered_run_for(Segment& segment, const GatheredSpec& spec, std::size_t& offset);
  /// Frees the slot of a segment that died.
  void release(Run& run, std::size_t offset, std::size_t bytes);

 private:
  Run& new_run(Lock& lock, const SegmentSpec& spec, std::size_t bytes, std::size_t page_bytes, bool is_shared);
  void bind_below(Segment& segment, const SegmentSpec& spec);
  void take_slots(Lock& lock, Run& run, const SegmentSpec& spec);
  void make_permanent(Lock& lock, Run& run, bool clears);
  void list_room(Run& run) noexcept;
  Run& new_gathered_run(const GatheredSpec& spec, std::size_t bytes, std::size_t page_bytes, bool packed);
  void let_die(Run& run);

  Monitor& monitor_;
  FrameMemory& memory_;
  Budgets& budgets_;
  Frames& frames_;
  Runs& runs_;
  Transfers& transfers_;
  Grants& grants_;
  Room& room_;
  const Homes homes_;
  const std::size_t page_bytes_;
  std::map<std::pair<Role, Tier>, std::vector<Run*>> shared_;  // runs of small tensors with room, or once had
  std::map<Role, Run*> open_;                                  // the gathered run that takes the next small tensor
};

}  // namespace zeropage
