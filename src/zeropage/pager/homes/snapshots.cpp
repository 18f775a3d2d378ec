#include "zeropage/pager/homes/snapshots.h"

#include <algorithm>
#include <cerrno>

#include "zeropage/base/errors.h"
#include "zeropage/pager/cache/gate.h"
#include "zeropage/pager/frame_cache.h"

namespace zeropage {
namespace {

using In = Frozen::Place;

bool is_newer_in_frame(Residency state) {
  return state == Residency::dirty || state == Residency::writing || state == Residency::rewritten;
}

/// An overwrite that has not ended is none yet.
Residency state_of_content(const Page& page, std::size_t index) {
  const auto before = page.frame ? Frames::state_before_overwrite(*page.frame, index) : Residency::clean;
  return before == Residency::clean ? page.state : before;
}

}  // namespace

FrozenSegment Snapshots::freeze(std::shared_ptr<FrameCache> cache, Segment& segment) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  if (run.slots || run.gathered()) throw AccessError("a page that tensors share is not frozen for one of them");
  pass(transfers_, lock, run, Intent::freeze);
  auto frozen = std::make_shared<Frozen>();
  frozen->run = &run;
  frozen->pages.resize(run.pages.size());
  FrozenSegment result;
  for (std::size_t i = 0; i < run.pages.size(); ++i) result.sizes_.push_back(run.bytes_of(i));
  std::erase_if(alive_, [](const auto& weak) { return weak.expired(); });
  alive_.push_back(frozen);
  // Nothing throws from here on.
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    const Page& page = run.pages[i];
    const Residency state = state_of_content(page, i);
    if (is_newer_in_frame(state)) {
      frozen->pages[i].place = In::frame;
      frozen->pages[i].older_on_its_way = state == Residency::rewritten;
    } else if (state != Residency::zero) {
      frozen->pages[i] = {In::home, page.home};
    }
  }
  run.frozen = frozen;
  transfers_.count_frozen(/*begins=*/true);
  result.snapshots_ = this;
  result.cache_ = std::move(cache);
  result.segment_ = &segment;
  result.frozen_ = std::move(frozen);
  write_behind(lock, run);
  return result;
}

/// Writes newer pages home soon, so that no thread has to wait for them. Under the lock, which the destructor of a
/// FrozenSegment takes: nothing may be thrown.
void Snapshots::write_behind(Lock& lock, Run& run) noexcept try {
  for (std::size_t i = 0; run.is_on_disk && i < run.pages.size(); ++i) {
    const Page& page = run.pages[i];
    if (transfers_.has_failed_write()) return;  // throw_failed_write() must come first
    if (page.state != Residency::dirty || page.frame->pins > 0) continue;
    if (!transfers_.write_back(lock, *page.frame, Priority::behind)) return;
  }
} catch (...) {  // the write starts again when a thread needs it, and throws its error then
}

void Snapshots::write_home(Lock& lock, Run& run) {
  transfers_.wait_until(lock, [&] { return run.lent == 0; });
  for (Page& page : run.pages) {
    bool is_held = false;  // by an operator, which may write the page again: then it stays dirty
    while (page.frame && is_newer_in_frame(page.state) && !is_held) {
      is_held = page.state == Residency::dirty && page.frame->pins > 0;
      const std::size_t failed_before = transfers_.failed_writes();
      if (page.state == Residency::dirty) transfers_.write_back(lock, *page.frame, Priority::demanded);
      transfers_.wait_until(lock, [&] { return !page.frame || page.frame->transfers == 0; }, Cause::content);
      transfers_.throw_failed_write(failed_before);
    }
  }
}

void Snapshots::let_go(FrozenSegment& segment) noexcept {
  if (monitor_.in_forked_child()) {
    new auto(std::move(segment.frozen_));  // the disk is the parent's
    return;
  }
  const Lock lock(monitor_.mutex());
  const auto frozen = std::move(segment.frozen_);
  if (frozen->run) frozen->run->frozen = nullptr;
  frozen->pages.clear();
  transfers_.count_frozen(/*begins=*/false);
  monitor_.changed().notify_all();
}

void Snapshots::close() noexcept {
  for (const auto& weak : alive_) {
    if (const auto frozen = weak.lock()) {
      for (Frozen::Page& page : frozen->pages) page.slot = nullptr;
    }
  }
}

FrozenSegment& FrozenSegment::operator=(FrozenSegment&& other) noexcept {
  std::swap(snapshots_, other.snapshots_);
  std::swap(cache_, other.cache_);
  std::swap(segment_, other.segment_);
  std::swap(frozen_, other.frozen_);
  std::swap(sizes_, other.sizes_);
  return *this;
}

FrozenSegment::~FrozenSegment() {
  if (frozen_) snapshots_->let_go(*this);
}

std::size_t FrozenSegment::pages() const { return frozen_->pages.size(); }

Frozen::Place FrozenSegment::place(std::size_t page) const {
  const Monitor::Lock lock(snapshots_->monitor_.mutex());
  return frozen_->pages[page].place;
}

HomeRead FrozenSegment::read(std::size_t page, std::byte* into) const {
  snapshots_->monitor_.check_usable();
  const Monitor::Lock lock(snapshots_->monitor_.mutex());
  snapshots_->monitor_.check_usable();
  return snapshots_->home_reads_.start_frozen(*frozen_->pages[page].slot, sizes_[page], into);
}

bool FrozenSegment::begin_copy(std::size_t page) const {
  const Monitor::Lock lock(snapshots_->monitor_.mutex());
  In& place = frozen_->pages[page].place;
  if (place == In::frame) place = In::copying;
  return place == In::copying;
}

void FrozenSegment::end_copy(std::size_t page) const {
  const Monitor::Lock lock(snapshots_->monitor_.mutex());
  frozen_->pages[page].place = In::nowhere;
  snapshots_->monitor_.changed().notify_all();
}

PagePin FrozenSegment::try_pin(std::size_t page) const {
  {
    const Monitor::Lock lock(snapshots_->monitor_.mutex());
    if (!frozen_->run) throw AccessError("a tensor died while a checkpoint of it was being written");
  }
  PagePin pin = cache_->try_pin_page(*segment_, page, Access::read, /*is_brief=*/true);
  if (pin) pin.wait(), pin.wait_for_uses();
  return pin;
}

bool FrozenSegment::is_on_device() const { return cache_->has_separate_memory(); }

}  // namespace zeropage
