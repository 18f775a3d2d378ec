#include "zeropage/pager/contents.h"

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/pager/frame_cache.h"

namespace zeropage {

void Contents::zero(Segment& segment) {
  monitor_.check_usable();
  Run& run = *segment.run();
  if (run.slots || run.gathered() || !run.home) {
    for (std::size_t i = 0; i < run.pages.size(); ++i) {
      PagePin pin = page_pins_.pin(segment, i, Access::overwrite);
      pin.wait();
      memory_.clear(pin.data(), segment.bytes_of(i));
    }
    return;
  }
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  transfers_.wait_until(lock, [&] { return run.lent == 0; });
  for (std::size_t i = 0; run.is_on_disk && i < run.pages.size(); ++i) {
    if (run.is_owed(i) || !run.has_slot_to_write(i)) transfers_.make_writable(lock, run, i);
  }
  ++run.changes;
  // A transfer must end before its memory is reused; its content is of no interest.
  const auto wait_for_transfers = [&] {
    const auto busy = [](const Page& page) { return page.frame && page.frame->transfers > 0; };
    for (auto page = std::ranges::find_if(run.pages, busy); page != run.pages.end();
         page = std::ranges::find_if(run.pages, busy)) {
      Frame& frame = *page->frame;
      transfers_.wait_for_reads(lock, frame);
      transfers_.wait_until(lock, [&] { return page->frame != &frame || frame.transfers == 0; }, Cause::content);
    }
  };
  wait_for_transfers();
  if (run.below) zero_below(lock, run, wait_for_transfers);
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    Page& page = run.pages[i];
    if (page.frame && page.frame->pins > 0) {
      memory_.order_after(*page.frame);
      memory_.clear(FrameMemory::address(run, i), run.bytes_of(i));
      Frames::mark(run, i, Access::overwrite);
      Frames::keep_promise(*page.frame, i);
    } else {
      page.state = Residency::zero;
      if (page.frame) frames_.give_up(*page.frame);
    }
  }
}

/// Before the pages here change, since only this can fail. Meanwhile none of them is written below.
void Contents::zero_below(Lock& lock, Run& run, const std::function<void()>& wait_for_transfers) {
  struct Kept {
    Frames& frames;
    std::vector<Frame*> pinned;
    ~Kept() {
      for (Frame* frame : pinned) frames.drop_pin(*frame);
    }
  } kept{frames_, {}};
  kept.pinned.reserve(run.pages.size());
  for (const Page& page : run.pages) {
    if (!page.frame || (!kept.pinned.empty() && kept.pinned.back() == page.frame)) continue;
    frames_.add_pin(*page.frame);
    kept.pinned.push_back(page.frame);
  }
  {
    const Inside inside(monitor_);
    const Unlocked unlocked(lock);
    run.home->forget(run);  // an upload may still read the page below
    run.below->cache()->zero(*run.below);
  }
  wait_for_transfers();  // reads that began meanwhile
}

void Contents::evict(Segment& segment) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  if (!run.home) return;
  room_.give_up_frames(lock, run);
  if (!run.below) return;
  const Inside inside(monitor_);
  const Unlocked unlocked(lock);
  run.below->cache()->evict(*run.below);
}

void Contents::store(Segment& segment) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  const bool dirty = std::any_of(run.pages.begin(), run.pages.end(), [](const Page& page) {
    return page.state == Residency::dirty && page.frame->pins == 0;
  });
  if (dirty) room_.give_up_frames(lock, run);
}

void Contents::share_changes(Segment& segment) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  const auto refuse_if_pinned = [&] {
    for (Page& page : run.pages) {
      if (page.frame && page.frame->pins > 0) {
        throw AccessError(
            "a tensor partitioned over ranks cannot be updated while it is pinned, or while a small tensor in its "
            "page is; let go of zeropage.pinned(tensor) first");
      }
    }
  };
  // While the lock was given up, another thread may have read or pinned pages again.
  while (true) {
    const auto held = [](const Page& page) { return page.frame != nullptr; };
    if (std::none_of(run.pages.begin(), run.pages.end(), held)) break;
    refuse_if_pinned();
    room_.give_up_frames(lock, run);
  }
  for (Page& page : run.pages) page.state = Residency::evicted;
}

}  // namespace zeropage
