// Pins of single pages: how rules stream a tensor.
#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/pager/pager.h"

namespace zeropage {

/// Starts the pages of a new frame on their way into it.
void Pager::read_into(Frame& frame) {
  Run& run = *frame.run;
  const std::size_t end = frame.first_page + frame.pages;
  try {
    for (std::size_t i = frame.first_page; i < end; ++i) {
      Page& page = run.pages[i];
      page.transfer = start_read(run, i, frame.memory.data() + (i - frame.first_page) * run.page_bytes);
      page.frame = &frame;
      page.state = Residency::reading;
    }
  } catch (...) {
    abandon_reads(frame);
    drop_frame(frame);
    throw;
  }
}

PagePin Pager::pin_page(Segment& segment, std::size_t index, Access access) {
  check_usable();
  std::lock_guard lock(mutex_);
  check_usable();
  Run& run = *segment.run_;
  Page& page = run.pages[index];
  if (access == Access::overwrite && run.shares_page()) access = Access::write;  // neighbours share the page
  if (!page.frame) {
    ++stats_.faults;
    // The host pays for single pages; where it has nothing, the device does.
    const Pool pool = host_.limit() >= 4 * page_bytes_ ? Pool::host : Pool::device;
    if (page.state == Residency::home && access != Access::overwrite) {
      read_into(*make_frame(run, index, 1, pool));
    } else {
      page.frame = make_frame(run, index, 1, pool);
      if (page.state == Residency::zero && access != Access::overwrite) {
        clear(page.frame->memory.data(), page.frame->memory.bytes());
        mark_ready(*page.frame);
      }
      page.state = newborn_state(run);
    }
  } else {
    if (page.state == Residency::reading && access != Access::read) settle(run, index);
    order_after(*page.frame);
    ++page.frame->pins;
  }
  PagePin pin;
  pin.pager_ = this;
  pin.page_ = &page;
  pin.frame_ = page.frame;
  pin.data_ = address(run, index) + segment.offset_;
  pin.write_ = access != Access::read;
  if (page.state != Residency::reading && !page.frame->permanent) mark(run, index, access);
  return pin;
}

bool Pager::prefetch_page(Segment& segment, std::size_t index) {
  std::lock_guard lock(mutex_);
  if (closed_ || gathers_) return false;  // [Note: gathered]: no gather may hang on whether memory is at hand
  return prefetch_page(*segment.run_, index);
}

bool Pager::prefetch_page(Run& run, std::size_t index) {
  Page& page = run.pages[index];
  if (page.frame || page.state != Residency::home) return true;
  return run.below ? below_->prefetch_page(*run.below, index) : read_into_spare_memory(run, index, 1);
}

bool Pager::prefetch(Segment& segment) {
  std::lock_guard lock(mutex_);
  if (closed_ || gathers_) return false;
  Run& run = *segment.run_;
  // Into one frame, if none of it is here and there is memory for all of it together.
  const bool absent = std::all_of(run.pages.begin(), run.pages.end(),
                                  [](const Page& page) { return !page.frame && page.state == Residency::home; });
  if (absent && !run.below && read_into_spare_memory(run, 0, run.pages.size())) return true;
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    if (!prefetch_page(run, i)) return false;
  }
  return true;
}

/// Starts reading pages that are at home into a new frame, if the host has memory for it, or what leaves at once
/// makes room.
bool Pager::read_into_spare_memory(Run& run, std::size_t first_page, std::size_t pages) {
  if (host_.limit() < 4 * page_bytes_) return false;
  std::size_t bytes = 0;
  for (std::size_t i = first_page; i < first_page + pages; ++i) bytes += round_up(run.bytes_of(i), kBlockBytes);
  Reservation charge = host_.try_reserve(bytes);
  while (!charge) {
    Frame* victim = policy_->victim(Pool::host);
    if (!victim || !leaves_at_once(*victim)) return false;
    evict_frame(*victim);
    charge = host_.try_reserve(bytes);
  }
  auto memory = arena_->try_allocate(bytes);
  if (!memory && evict_window(bytes, /*clean_only=*/true)) memory = arena_->try_allocate(bytes);
  if (!memory) return false;
  Frame& frame = *place_frame(run, first_page, pages, Pool::host, std::move(charge), std::move(*memory));
  read_into(frame);
  drop_pin(frame);
  return true;
}

PagePin::~PagePin() {
  if (!frame_) return;
  std::lock_guard lock(pager_->mutex_);
  if (pager_->closed_) return;
  pager_->mark_used(*frame_);
  const bool passes = passes_ && !pager_->gathers_ && frame_->pins == 1 && !frame_->permanent && frame_->run;
  pager_->drop_pin(*frame_);
  if (passes && page_->frame == frame_ && pager_->is_short(pager_->paying(frame_->pool))) {
    pager_->clean(*frame_);
    pager_->policy_->retire(*frame_);
  }
  pager_->clean_coldest();
}

void PagePin::wait() {
  std::lock_guard lock(pager_->mutex_);
  if (page_->state != Residency::reading) return;
  Run& run = *frame_->run;
  const std::size_t index = page_ - run.pages.data();
  pager_->settle(run, index);
  pager_->mark_ready(*frame_);
  if (write_) pager_->mark(run, index, Access::write);
}

void PagePin::fill(const std::byte* from, std::size_t bytes, std::size_t offset) {
  pager_->copy(data_ + offset, from, bytes);
}

}  // namespace zeropage
