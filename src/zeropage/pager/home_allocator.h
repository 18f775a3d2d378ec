// Which run a new segment lies in, and where that run is at home. A large tensor has a run of its own; small ones
// share a page: in one process they take the place of one that died, over ranks no place is taken twice.
//
// Contract: under the cache's lock, which is given up where memory is waited for or a lower cache is asked. What
// throws has made no run.
#pragma once

#include <map>
#include <vector>

#include "zeropage/comm/ranks.h"
#include "zeropage/pager/room.h"

namespace zeropage {

class FrameCache;

/// Where runs can be at home, other than in a frame. Null: there is none.
struct Homes {
  Home* home;         // of runs with no frame of their own
  SwapFile* swap;     // where that is a disk
  FrameCache* lower;  // where that is a cache below, or ranks' shares
  Ranks* ranks;       // null but for the cache of gathered tensors
};

class HomeAllocator {
 public:
  using Lock = Monitor::Lock;

  HomeAllocator(Monitor& monitor, FrameMemory& memory, Budgets& budgets, Frames& frames, Runs& runs,
                Transfers& transfers, Room& room, const Homes& homes, std::size_t page_bytes)
      : monitor_(monitor),
        memory_(memory),
        budgets_(budgets),
        frames_(frames),
        runs_(runs),
        transfers_(transfers),
        room_(room),
        homes_(homes),
        page_bytes_(page_bytes) {}

  /// A run with room for a segment, at `offset`. Throws BudgetError, DiskError, ConfigError.
  Run& run_for(Lock& lock, const SegmentSpec& spec, std::size_t& offset);
  Run& gathered_run_for(Segment& segment, const GatheredSpec& spec, std::size_t& offset);
  /// A segment that lay there is gone.
  void release(Run& run, std::size_t offset, std::size_t bytes);

 private:
  Run& new_run(Lock& lock, const SegmentSpec& spec, std::size_t bytes, std::size_t page_bytes);
  void bind_below(Segment& segment, const SegmentSpec& spec);
  void make_permanent(Lock& lock, Run& run);
  void list_room(Run& run);
  Run& new_gathered_run(const GatheredSpec& spec, std::size_t bytes, std::size_t page_bytes, bool packed);
  void let_die(Run& run);

  Monitor& monitor_;
  FrameMemory& memory_;
  Budgets& budgets_;
  Frames& frames_;
  Runs& runs_;
  Transfers& transfers_;
  Room& room_;
  const Homes homes_;
  const std::size_t page_bytes_;
  std::map<std::pair<Role, Tier>, std::vector<Run*>> shared_;  // runs of small tensors with room, or once had
  std::map<Role, Run*> open_;                                  // the gathered run that takes the next small tensor
};

}  // namespace zeropage
