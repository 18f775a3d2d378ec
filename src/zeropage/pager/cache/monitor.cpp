#include "zeropage/pager/cache/monitor.h"

#include "zeropage/base/errors.h"

namespace zeropage {

void Monitor::check_not_forked() const {
  if (!in_forked_child()) return;
  throw AccessError(
      "this tensor is paged by the parent process and a forked child cannot use it; use the spawn "
      "start method, or pass a copy made with zeropage.pinned(tensor)");
}

void Monitor::check_usable() const {
  check_not_forked();
  if (closed_)
    throw AccessError("this tensor's space was closed and its data is gone; close a space after its last use");
}

/// [Note: virtual time] in base/clock.h.
void Monitor::sleep(Lock& lock) {
  if (!planned_) return changed_.wait(lock);
  const Unlocked unlocked(lock);
  if (!planned_->run_next()) throw Error("a planned run waits for what never comes: nothing is under way");
}

}  // namespace zeropage
