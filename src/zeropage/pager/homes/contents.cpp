#include "zeropage/pager/homes/contents.h"

#include <fmt/format.h>

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
  // A thread that copies the pages to one frame without the lock would bring the old content back.
  const auto is_free = [&] { return run.lent == 0 && run.filling == 0; };
  ++run.changes;
  do {
    transfers_.wait_until(lock, is_free);
    for (std::size_t i = 0; run.is_on_disk && i < run.pages.size(); ++i) {
      if (run.is_owed(i) || !run.has_slot_to_write(i)) transfers_.make_writable(lock, run, i);
    }
    settle_transfers(lock, run);
    if (run.below) {
      (void)change_below(lock, run, [&] { return run.below->cache()->zero(*run.below), true; });
    }
  } while (!is_free());
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    Page& page = run.pages[i];
    if (page.frame && page.frame->pins > 0) {
      memory_.order_after(*page.frame);
      memory_.clear(FrameMemory::address(run, i), run.bytes_of(i));
      Frames::mark(run, i, Access::overwrite);
      Frames::keep_promise(*page.frame, i);
    } else {
      page.state = Residency::zero;
      transfers_.forget_failed_write(page);
      if (page.frame) frames_.give_up(*page.frame);
    }
  }
}

/// Returns when no transfer of the run is in flight. The content that they move is of no interest.
void Contents::settle_transfers(Lock& lock, Run& run) {
  const auto busy = [](const Page& page) { return page.frame && page.frame->transfers > 0; };
  for (auto page = std::ranges::find_if(run.pages, busy); page != run.pages.end();
       page = std::ranges::find_if(run.pages, busy)) {
    Frame& frame = *page->frame;
    transfers_.wait_for_reads(lock, frame);
    transfers_.wait_until(lock, [&] { return page->frame != &frame || frame.transfers == 0; }, Cause::content);
  }
}

bool Contents::map(Segment& segment, std::span<const SlotRef> slots) {
  monitor_.check_usable();
  Run& run = *segment.run();
  if (run.slots || run.gathered() || (!run.below && !run.is_on_disk)) return false;
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  settle_transfers(lock, run);
  if (run.has_version || run.lent > 0 || run.filling > 0) return false;
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    const Frame* const frame = run.pages[i].frame;
    if (run.is_owed(i) || (frame && (frame->pins > 0 || frame->assembling))) return false;
    // A frame that leaves takes all of its pages with it.
    if (frame && i > frame->first_page && !slots[i] != !slots[i - 1]) return false;
  }
  ++run.changes;
  if (run.below && !change_below(lock, run, [&] { return run.below->cache()->map(*run.below, slots); })) return false;
  // Another thread may have pinned a page meanwhile. The caller then writes the content there.
  for (const Page& page : run.pages) {
    if (page.frame && page.frame->pins > 0) return false;
  }
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    Page& page = run.pages[i];
    if (!slots[i]) continue;
    page.state = Residency::evicted;
    transfers_.forget_failed_write(page);
    if (page.frame) frames_.give_up(*page.frame);
    if (run.below) continue;
    // The next write has its place on disk already.
    if (!page.target && is_sole_and_writable(page.home)) page.target = page.home;
    page.home = slots[i];
  }
  return true;
}

/// Changes the content below. Before the pages here change, since only this can fail. Meanwhile none of them is
/// written below.
bool Contents::change_below(Lock& lock, Run& run, const std::function<bool()>& change) {
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
  bool changed = false;
  {
    const Inside inside(monitor_);
    const Unlocked unlocked(lock);
    run.home->forget(run);
    for (std::size_t i = 0; i < run.pages.size(); ++i) run.home->finish_reads(run, i);
    run.home->tidy(/*wait=*/false);
    changed = change();
  }
  settle_transfers(lock, run);  // reads that began meanwhile
  return changed;
}

void Contents::evict(Segment& segment) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  if (!run.home) return;
  room_.give_up_frames(lock, run);
  const std::shared_ptr<Segment> secondary = run.secondary ? run.secondary->share : nullptr;
  Segment* const below = secondary ? secondary.get() : run.below.get();
  if (!below) return;
  const Inside inside(monitor_);
  const Unlocked unlocked(lock);
  below->cache()->evict(*below);
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
  drop_frames(lock, run, "updated");
  for (Page& page : run.pages) page.state = Residency::evicted;
  run.outdate_secondary();
  run.coding = run.usual_coding;
}

void Contents::gather_exactly(Segment& segment) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  if (run.coding == Coding::none) return;
  drop_frames(lock, run, "written");
  run.outdate_secondary();
  run.coding = Coding::none;
}

void Contents::drop_frames(Lock& lock, Run& run, std::string_view what) {
  const auto refuse_if_pinned = [&] {
    for (Page& page : run.pages) {
      if (page.frame && page.frame->pins > 0) {
        throw AccessError(
            fmt::format("a tensor partitioned over ranks cannot be {} while it is pinned, or while a small tensor in "
                        "its page is; let go of zeropage.pinned(tensor) first",
                        what));
      }
    }
  };
  // While the lock was given up, another thread may have read or pinned pages again.
  while (true) {
    const auto held = [](const Page& page) { return page.frame != nullptr; };
    if (std::none_of(run.pages.begin(), run.pages.end(), held)) return;
    refuse_if_pinned();
    room_.give_up_frames(lock, run);
  }
}

}  // namespace zeropage
