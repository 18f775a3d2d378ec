// The gate to a page: what stands in the way of a use of it, and the wait until that is over. Pins, prefetches, reads
// from home, loans, snapshots and second versions all pass here. Whatever was true before a wait is looked at again
// after it.
//
// Contract: under the cache's lock, which it gives up while it waits.
#pragma once

#include "zeropage/pager/transfers.h"

namespace zeropage {

/// What a caller is about to do with a page.
enum class Intent : std::uint8_t {
  pin,           // hold it in memory
  assemble,      // put its run together in one frame
  prefetch,      // read it before it is asked for
  bypass,        // read it from its home past the cache
  lend,          // hand it to code on the host
  freeze,        // take a snapshot of it
  open_version,  // keep its content while new content is written
};

/// Why a page cannot be used now.
enum class Obstacle : std::uint8_t {
  none,
  version,    // a second version is open
  lent,       // code on the host has it
  assembled,  // a thread puts its run together in one frame
  claimed,    // a thread is about to overwrite it
  moving,     // a transfer of it is in flight
  pinned,     // an operator or a rule holds it
  newer,      // its frame is newer than its home
  absent,     // it is not at its home: it was never written, or its run is dead, or has another kind of home
  frozen,     // a checkpoint has yet to end
};

/// The first obstacle to the use of one page, or of all of a run's pages.
Obstacle obstacle(const Run& run, std::size_t page, Intent intent);
Obstacle obstacle(const Run& run, Intent intent);

/// Returns when nothing stands in the way of the page, or of all of the run's pages. Throws VersionOpen for another
/// thread's second version. True if it waited.
bool pass(Transfers& transfers, Monitor::Lock& lock, const Run& run, std::size_t page, Intent intent);
bool pass(Transfers& transfers, Monitor::Lock& lock, const Run& run, Intent intent);

}  // namespace zeropage
