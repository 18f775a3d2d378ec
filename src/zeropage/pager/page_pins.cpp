// Pins of single pages: how rules stream a tensor.
#include "zeropage/base/errors.h"
#include "zeropage/pager/pager.h"

namespace zeropage {

/// Starts a page on its way into a frame of its own, which is pinned.
Frame& Pager::read_page(Run& run, std::size_t index, Pool pool) {
  Page& page = run.pages[index];
  Frame& frame = *make_frame(run, index, 1, pool);
  try {
    page.transfer = start_read(run, index, frame.memory.data());
  } catch (...) {
    drop_frame(frame);
    throw;
  }
  page.frame = &frame;
  page.state = Residency::reading;
  return frame;
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
      read_page(run, index, pool);
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
  Run& run = *segment.run_;
  Page& page = run.pages[index];
  if (run.below && !page.frame && page.state == Residency::home) return below_->prefetch_page(*run.below, index);
  if (page.frame || page.state != Residency::home) return true;
  if (host_.limit() < 4 * page_bytes_) return false;
  const std::size_t bytes = round_up(run.bytes_of(index), kBlockBytes);
  while (host_.used() + bytes > host_.limit()) {
    Frame* victim = policy_->victim(Pool::host);
    if (!victim) return false;
    for (std::size_t i = victim->first_page; i < victim->first_page + victim->pages; ++i) {
      const Page& cold = victim->run->pages[i];
      if (cold.state != Residency::clean && !(cold.state == Residency::writing && cold.transfer.done())) return false;
    }
    evict_frame(*victim);
  }
  try {
    drop_pin(read_page(run, index, Pool::host));
  } catch (const BudgetError&) {  // only a hint: whoever needs the page will say what is wrong
    return false;
  }
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
