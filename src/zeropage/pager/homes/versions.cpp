#include "zeropage/pager/homes/versions.h"

#include <algorithm>

#include "zeropage/pager/cache/gate.h"

namespace zeropage {
bool Versions::open(Segment& segment, bool write_first) {
  monitor_.check_usable();
  if (!swap_ || !segment.run()->is_on_disk) return false;
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  if (write_first) write_home(lock, run);
  const auto may_open = [&] { return obstacle(run, Intent::open_version) == Obstacle::none; };
  if (!may_open()) return false;
  const Inside inside(monitor_);
  std::vector<SlotRef> slots(run.pages.size());
  {
    const Unlocked unlocked(lock);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Extent extent = swap_->try_allocate_spare(run.bytes_of(i));
      if (!extent) return false;
      slots[i] = std::make_shared<Slot>(std::move(extent));
    }
  }
  monitor_.check_usable();
  if (!may_open()) return false;
  for (std::size_t i = 0; i < slots.size(); ++i) run.pages[i].target = std::move(slots[i]);
  run.has_version = true;
  run.writer = std::this_thread::get_id();
  return true;
}

void Versions::write_home(Lock& lock, Run& run) {
  const std::size_t failed_before = transfers_.failed_writes();
  write_behind(lock, run, Priority::demanded);
  const auto is_writing = [](const Page& page) { return page.frame && page.frame->transfers > 0; };
  const auto ended = [&] {
    return transfers_.failed_writes() != failed_before || std::ranges::none_of(run.pages, is_writing);
  };
  transfers_.wait_until(lock, ended, Cause::content);
}

void Versions::write_behind(Lock& lock, Run& run, Priority priority) {
  for (const Page& page : run.pages) {
    if (transfers_.has_failed_write()) return;  // throw_failed_write() must come first
    const bool is_dirty = page.state == Residency::dirty && page.frame->pins == 0 && !page.frame->permanent;
    if (is_dirty && !transfers_.write_back(lock, *page.frame, priority)) return;
  }
}

void Versions::write_behind(Segment& segment) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  write_behind(lock, *segment.run(), Priority::behind);
}

bool Versions::commit(std::span<Segment* const> segments) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  const auto is_whole = [](const Segment* segment) {
    return std::ranges::all_of(segment->run()->pages, &Page::is_new);
  };
  if (!std::ranges::all_of(segments, is_whole)) return false;
  for (Segment* segment : segments) {
    Run& run = *segment->run();
    // No transfer uses the earlier slots: each page had been read before it was written. A checkpoint may hold them.
    for (Page& page : run.pages) {
      const bool had_content = page.home && page.home->extent;
      had_content ? page.target->extent.replace(page.home->extent) : page.target->extent.keep();
      page.home = std::exchange(page.target, nullptr);
      page.is_new = false;
    }
    run.has_version = false;
    ++run.changes;
  }
  return true;
}

void Versions::discard(Segment& segment) {
  if (monitor_.in_forked_child()) return;  // it belongs to the parent
  Lock lock(monitor_.mutex());
  if (monitor_.closed() || !segment.run() || !segment.run()->has_version) return;
  Run& run = *segment.run();
  const auto is_busy = [](const Page& page) {
    return page.is_new && page.frame && (page.frame->transfers > 0 || page.frame->pins > 0);
  };
  transfers_.wait_until(lock, [&] { return std::ranges::none_of(run.pages, is_busy); }, Cause::content);
  for (Page& page : run.pages) {
    page.target = nullptr;
    if (!std::exchange(page.is_new, false)) continue;
    transfers_.forget_failed_write(page);
    if (!page.frame) continue;
    // The frame's other pages are new too, or unchanged from home.
    for (std::size_t i = page.frame->first_page; i < page.frame->first_page + page.frame->pages; ++i) {
      if (run.pages[i].frame == page.frame) run.pages[i].is_new = false;
    }
    frames_.evict(*page.frame);
  }
  run.has_version = false;
  ++run.changes;
}

}  // namespace zeropage
