// How a thread waits for transfers. Private to pager/.
#pragma once

#include "zeropage/pager/frame_cache.h"

namespace zeropage {

/// Returns when `ready` says so. Throws AccessError if the cache is closed meanwhile.
template <class Ready>
void FrameCache::wait_until(Lock& lock, Ready ready) {
  if (ready()) return;
  const Waiting waiting(monitor_.waited_seconds());
  const Inside inside(monitor_);
  while (!ready()) {
    check_usable();
    bool ended = false;
    if (has_separate_memory()) {
      const Unlocked unlocked(lock);
      ended = home_->tidy(/*wait=*/true);
    }
    if (!ended && !ready()) monitor_.changed().wait(lock);
    check_usable();
  }
}

}  // namespace zeropage
