#include "zeropage/pager/cache/gate.h"

namespace zeropage {
namespace {

/// Obstacles that concern the whole run.
Obstacle obstacle_of_run(const Run& run, Intent intent) {
  const bool takes_part = intent == Intent::pin || intent == Intent::assemble;
  if (takes_part ? run.is_closed_to_this_thread() : run.has_version && intent != Intent::prefetch) {
    return Obstacle::version;
  }
  switch (intent) {
    case Intent::pin:
      return run.filling > 0 ? Obstacle::assembled : Obstacle::none;
    case Intent::assemble:
      if (run.lent > 0) return Obstacle::lent;
      return run.assembled ? Obstacle::assembled : Obstacle::none;
    case Intent::prefetch:
      if (!run.home || run.dead) return Obstacle::absent;
      if (run.lent > 0) return Obstacle::lent;
      return run.assembled ? Obstacle::assembled : Obstacle::none;
    case Intent::bypass:
      return run.is_on_disk && !run.slots ? Obstacle::none : Obstacle::absent;
    case Intent::lend:
      return run.assembled ? Obstacle::assembled : Obstacle::none;
    case Intent::freeze:
      if (run.lent > 0) return Obstacle::lent;
      if (run.filling > 0) return Obstacle::assembled;
      return run.frozen ? Obstacle::frozen : Obstacle::none;
    case Intent::open_version:
      if (!run.is_on_disk || run.slots) return Obstacle::absent;
      return run.assembled ? Obstacle::assembled : Obstacle::none;
  }
  return Obstacle::none;
}

/// Obstacles that concern one page.
Obstacle obstacle_of_page(const Run& run, const Page& page, Intent intent) {
  const Frame* const frame = page.frame;
  const bool has_no_content = page.state == Residency::evicted || page.state == Residency::zero;
  switch (intent) {
    case Intent::pin:
    case Intent::assemble:
      if (page.lent) return Obstacle::lent;
      if (frame && (frame->clearing || frame->reverting)) return Obstacle::claimed;
      return frame && has_no_content && frame->claimer != std::thread::id() &&
                     frame->claimer != std::this_thread::get_id()
                 ? Obstacle::claimed
                 : Obstacle::none;
    case Intent::bypass:
      return page.state == Residency::evicted && !frame ? Obstacle::none : Obstacle::absent;
    case Intent::lend:
      if (page.lent) return Obstacle::lent;
      if (frame && frame->transfers > 0) return Obstacle::moving;
      if (frame && frame->pins > 0) return Obstacle::pinned;
      return frame && page.state == Residency::dirty && run.home ? Obstacle::newer : Obstacle::none;
    case Intent::open_version:
      if (page.lent) return Obstacle::lent;
      if (frame && frame->pins > 0) return Obstacle::pinned;
      if (page.state == Residency::zero) return Obstacle::absent;
      return page.state == Residency::evicted || page.state == Residency::reading || page.state == Residency::clean
                 ? Obstacle::none
                 : Obstacle::newer;
    case Intent::prefetch:
    case Intent::freeze:
      return Obstacle::none;
  }
  return Obstacle::none;
}

bool wait_while(Transfers& transfers, Monitor::Lock& lock, const std::function<Obstacle()>& now) {
  bool waited = false;
  while (true) {
    const Obstacle obstacle = now();
    if (obstacle == Obstacle::none) return waited;
    if (obstacle == Obstacle::version) throw VersionOpen();
    waited = true;
    transfers.wait_until(lock, [&] { return now() != obstacle; });
  }
}

}  // namespace

Obstacle obstacle(const Run& run, std::size_t page, Intent intent) {
  const Obstacle of_run = obstacle_of_run(run, intent);
  return of_run == Obstacle::none ? obstacle_of_page(run, run.pages[page], intent) : of_run;
}

Obstacle obstacle(const Run& run, Intent intent) {
  Obstacle found = obstacle_of_run(run, intent);
  if (intent == Intent::prefetch || intent == Intent::freeze) return found;  // which look at no page
  for (std::size_t i = 0; found == Obstacle::none && i < run.pages.size(); ++i) {
    found = obstacle_of_page(run, run.pages[i], intent);
  }
  return found;
}

bool pass(Transfers& transfers, Monitor::Lock& lock, const Run& run, std::size_t page, Intent intent) {
  return wait_while(transfers, lock, [&] { return obstacle(run, page, intent); });
}

bool pass(Transfers& transfers, Monitor::Lock& lock, const Run& run, Intent intent) {
  return wait_while(transfers, lock, [&] { return obstacle(run, intent); });
}

}  // namespace zeropage
