// The gate to a page: the obstacles to a use of it, and the wait until they are gone. Pins, prefetches, reads
// from home, loans, snapshots and second versions all pass here. Whatever was true before a wait is looked at again
// after it.
//
// Contract: under the cache's lock, which it gives up while it waits.
#pragma once

#include "zeropage/pager/cache/transfers.h"

namespace zeropage {

/// The use of a page for which a caller asks.
enum class Intent : std::uint8_t {
  pin,           // Hold it in memory.
  assemble,      // Put its run together in one frame.
  prefetch,      // Read it before it is asked for.
  bypass,        // Read it from its home past the cache.
  lend,          // Hand it to code on the host.
  freeze,        // Take a snapshot of it.
  open_version,  // Keep its content while new content is written.
};

/// The reason why a page cannot be used now.
enum class Obstacle : std::uint8_t {
  none,
  version,    // A second version is open.
  lent,       // Code on the host has it.
  assembled,  // A thread puts its run together in one frame.
  claimed,    // A thread is about to overwrite it.
  moving,     // A transfer of it is in flight.
  pinned,     // An operator or a rule holds it.
  newer,      // Its frame is newer than its home.
  absent,     // It is not at its home, or its run has no home of that kind.
  frozen,     // A checkpoint has yet to end.
};

/// The first obstacle to the use of one page, or of all of a run's pages.
Obstacle obstacle(const Run& run, std::size_t page, Intent intent);
Obstacle obstacle(const Run& run, Intent intent);

/// Returns when nothing stands in the way of the page, or of all of the run's pages. Throws VersionOpen for another
/// thread's second version. True if it waited.
bool pass(Transfers& transfers, Monitor::Lock& lock, const Run& run, std::size_t page, Intent intent);
bool pass(Transfers& transfers, Monitor::Lock& lock, const Run& run, Intent intent);

}  // namespace zeropage
