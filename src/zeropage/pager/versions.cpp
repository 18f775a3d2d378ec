#include "zeropage/pager/versions.h"

#include <algorithm>

namespace zeropage {
namespace {

/// Whether the content is at home, and no operator holds the page.
bool is_at_home(const Page& page) {
  if (page.lent || (page.frame && page.frame->pins > 0)) return false;
  return page.state == Residency::evicted || page.state == Residency::reading || page.state == Residency::clean;
}

}  // namespace

bool Versions::open(Segment& segment, bool write_first) {
  monitor_.check_usable();
  if (!swap_ || !segment.run()->is_on_disk) return false;
  auto next = std::make_shared<Backing>();
  next->extent = swap_->try_allocate_spare(segment.run()->bytes);
  if (!next->extent) return false;
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  if (write_first) write_home(lock, run);
  if (run.slots || run.assembled || run.next || !std::ranges::all_of(run.pages, is_at_home)) return false;
  run.next = std::move(next);
  run.writer = std::this_thread::get_id();
  return true;
}

void Versions::write_home(Lock& lock, Run& run) {
  const std::size_t failed_before = transfers_.failed_writes();
  write_behind(lock, run, Priority::demanded);
  const auto is_writing = [](const Page& page) { return page.frame && page.frame->transfers > 0; };
  transfers_.wait_until(lock, [&] {
    return transfers_.failed_writes() != failed_before || std::ranges::none_of(run.pages, is_writing);
  });
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
    // No transfer uses the earlier backing: each page had been read before it was written. It is released unless a
    // checkpoint holds it.
    const auto has_extent = [](const auto& backing) { return backing && backing->extent; };
    const auto frozen = std::ranges::find_if(run.others, has_extent);
    const auto before = run.own ? run.own : frozen != run.others.end() ? *frozen : nullptr;
    run.own = std::exchange(run.next, nullptr);
    before ? run.own->extent.replace(before->extent) : run.own->extent.keep();
    for (std::size_t i = 0; i < run.pages.size(); ++i) {
      run.pages[i].is_new = false;
      run.place(i, run.own);
    }
    ++run.changes;
  }
  return true;
}

void Versions::discard(Segment& segment) {
  if (monitor_.in_forked_child()) return;  // it belongs to the parent
  Lock lock(monitor_.mutex());
  if (monitor_.closed() || !segment.run() || !segment.run()->next) return;
  Run& run = *segment.run();
  const auto is_busy = [](const Page& page) {
    return page.is_new && page.frame && (page.frame->transfers > 0 || page.frame->pins > 0);
  };
  transfers_.wait_until(lock, [&] { return std::ranges::none_of(run.pages, is_busy); });
  for (Page& page : run.pages) {
    if (!std::exchange(page.is_new, false) || !page.frame) continue;
    // The frame's other pages are new too, or unchanged from home.
    for (std::size_t i = page.frame->first_page; i < page.frame->first_page + page.frame->pages; ++i) {
      if (run.pages[i].frame == page.frame) run.pages[i].is_new = false;
    }
    frames_.evict(*page.frame);
  }
  run.next = nullptr;
  ++run.changes;
}

}  // namespace zeropage
