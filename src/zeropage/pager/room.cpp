// Memory: what it is given to, and what leaves when it is short.
#include <fmt/format.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/pager/waiting.h"

namespace zeropage {
namespace {

/// How much is written behind where no plan says what leaves next.
constexpr std::size_t kBehindShare = 4;  // a quarter of memory
/// For memory that other threads have pinned.
constexpr std::chrono::seconds kLongestWait{5};
/// Meanwhile other threads' transfers to and from a device end without a word.
constexpr std::chrono::milliseconds kUntilTidied{5};

}  // namespace

/// A frame with one pin. Waits for what must be written, and for what other threads hold. Throws Shortage if nothing
/// is left that could leave, DiskError if what should leave cannot be written.
Frame& FrameCache::make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages, bool permanent) {
  const std::size_t failed_before = failed_writes_;
  const std::size_t bytes = FrameMemory::bytes_of(run, first_page, pages);
  if (bytes > memory_.budget().limit()) throw Shortage{};
  bool clearing = false;  // neighbours are being written
  std::chrono::steady_clock::time_point give_up_at;
  while (true) {
    check_usable();
    bool fragmented = false;
    if (Frame* frame = memory_.try_make(run, first_page, pages, permanent, fragmented)) {
      count_pin();
      budgets_.note_usage();
      return *frame;
    }
    const bool needs_window = fragmented && !memory_.joins_holes();
    if (failed_writes_ != failed_before && failed_write_) {
      Frame* clean = victims_.best_clean([this](const Frame& f) { return !is_dirty(f); });
      if (clean && !needs_window) {
        evict_frame(*clean);
        continue;
      }
      std::rethrow_exception(std::exchange(failed_write_, nullptr));
    }
    plan_anew();
    const bool enough = !fragmented && writing_bytes_ > 0 && memory_.free() + writing_bytes_ >= bytes;
    if (needs_window) {
      if (clear_window(bytes, 0, /*clean_only=*/true, lock)) continue;
      if ((!clearing || writing_bytes_ == 0) && clear_window(bytes, 0, false, lock)) {
        clearing = true;
        continue;
      }
      clearing = false;
    } else if (Frame* victim = victims_.best(timeline_.now())) {
      if (!is_dirty(*victim)) {
        evict_frame(*victim);
        continue;
      }
      // It must be written first. What is clean and is not used soon leaves instead of being waited for.
      Frame* clean = victims_.best_clean([this](const Frame& f) { return !is_dirty(f); });
      const bool leaves = clean && clean->next_use > timeline_.now() + memory_.budget().limit() / 2;
      if (leaves) evict_frame(*clean);
      if (!enough) write_back(lock, *victim, Priority::demanded);
      if (leaves || !enough) continue;
    }
    if (ranks_ && reading_bytes_ > 0) {  // a gather ends when it is waited for
      const auto& frames = memory_.frames();
      Frame* first = nullptr;  // in an order that is the same on all ranks
      for (const auto& [_, frame] : frames) {
        if (!is_reading(*frame)) continue;
        if (!first || std::pair(frame->ordinal, frame->first_page) < std::pair(first->ordinal, first->first_page)) {
          first = frame.get();
        }
      }
      if (first) {
        wait_for_reads(lock, *first);
        continue;
      }
    }
    if (writing_bytes_ > 0 || reading_bytes_ > 0) {
      // Until one of them has ended, or, where neighbours must leave together, all.
      const std::size_t writing = writing_bytes_, reading = reading_bytes_, queued = victims_.size();
      wait_until(lock, [&] {
        if (needs_window && writing > 0) return writing_bytes_ == 0;
        return writing_bytes_ != writing || reading_bytes_ != reading || victims_.size() != queued;
      });
      continue;
    }
    if (upper_) {  // transfers of the cache above hold pages here, and may have ended without a word
      bool ended = false;
      {
        const Unlocked unlocked(lock);
        const std::lock_guard progress(progress_mutex_);
        FrameCache* const upper = upper_;
        ended = upper && upper->home_->tidy(/*wait=*/true);
      }
      if (ended) continue;
    }
    // ShardedHome frees what its gathers hold when it is refused.
    if ((!serves_upper_ || upper_) && pins_ > pins_of_this_thread()) {
      // What other threads hold they let go of, unless they wait for this one: that is found out by waiting long.
      const auto now = std::chrono::steady_clock::now();
      if (give_up_at == decltype(give_up_at){}) give_up_at = now + kLongestWait;
      const auto until = upper_ ? std::min(give_up_at, now + kUntilTidied) : give_up_at;
      const std::size_t pins = pins_, queued = victims_.size();
      const Waiting waiting(monitor_.waited_seconds());
      const bool more = monitor_.changed().wait_until(
          lock, until, [&] { return pins_ < pins || victims_.size() > queued || monitor_.closed(); });
      if (victims_.size() > queued) give_up_at = {};
      if (more || until < give_up_at) continue;
    }
    throw Shortage{};
  }
}

/// The same without waiting; what leaves is clean and used later than `before`. Null if that is not enough.
Frame* FrameCache::try_make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages,
                                  AccessPlan::Time before) {
  bool fragmented = false;
  Frame* frame = memory_.try_make(run, first_page, pages, false, fragmented);
  if (!frame && fragmented && !memory_.joins_holes() &&
      clear_window(FrameMemory::bytes_of(run, first_page, pages), before, true, lock)) {
    frame = memory_.try_make(run, first_page, pages, false, fragmented);
  }
  while (!frame && fragmented && memory_.joins_holes()) {  // what is free is less than the pieces that can be joined
    Frame* const victim = victims_.best(timeline_.now(), before);
    if (!victim || is_dirty(*victim)) break;
    evict_frame(*victim);
    frame = memory_.try_make(run, first_page, pages, false, fragmented);
  }
  if (!frame) return nullptr;
  count_pin();
  budgets_.note_usage();
  return frame;
}

void FrameCache::forget_frame(const Frame& frame) noexcept {
  for (std::size_t i = 0; frame.run && i < frame.pages; ++i) {
    Page& page = frame.run->pages[frame.first_page + i];
    if (page.frame == &frame) page.frame = nullptr;
  }
}

/// Forgets a frame; its pages must not need it.
void FrameCache::drop_frame(Frame& frame) noexcept {
  forget_frame(frame);
  if (frame.ahead) ahead_bytes_ -= frame.memory.bytes();
  victims_.remove(frame);
  memory_.drop(frame);
  monitor_.changed().notify_all();
}

bool FrameCache::is_reading(const Frame& frame) {
  if (!frame.run || frame.transfers == 0) return false;
  const auto first = frame.run->pages.begin() + static_cast<std::ptrdiff_t>(frame.first_page);
  return std::any_of(first, first + static_cast<std::ptrdiff_t>(frame.pages),
                     [&](const Page& page) { return page.frame == &frame && page.state == Residency::reading; });
}

bool FrameCache::is_dirty(const Frame& frame) const {
  if (!frame.run) return false;
  const auto first = frame.run->pages.begin() + static_cast<std::ptrdiff_t>(frame.first_page);
  return std::any_of(first, first + static_cast<std::ptrdiff_t>(frame.pages),
                     [&](const Page& page) { return page.frame == &frame && page.state == Residency::dirty; });
}

/// Of a clean frame that nothing uses.
void FrameCache::evict_frame(Frame& frame) {
  for (std::size_t i = 0; frame.run && i < frame.pages; ++i) {
    Page& page = frame.run->pages[frame.first_page + i];
    if (page.frame == &frame) page.state = Residency::evicted;
  }
  ahead_.evicted(frame.next_use);
  drop_frame(frame);
  ++stats_.evictions;
}

/// Puts a frame that could leave in its place among the others.
void FrameCache::consider(Frame& frame) noexcept {
  if (frame.permanent || frame.pins > 0 || frame.transfers > 0) return;
  const bool dirty = is_dirty(frame);
  const auto next = timeline_.plan().next_use(frame.ordinal);
  const bool is_read = next.access != Access::overwrite || frame.shares_page;
  AccessPlan::Time time = frame.transient ? AccessPlan::kNever - 1 : VictimQueue::unplanned(frame.last_use);
  if (next.begin != AccessPlan::kNever) {
    time = AccessPlan::time_of_page(next.begin, next.end, frame.first_page, frame.run_pages);
  }
  if (!frame.run) return victims_.insert(frame, time, static_cast<int>(is_read));
  const Run& run = *frame.run;
  // Of pages that are gone through now, those that have not been taken yet are next.
  constexpr std::size_t kLargestGroup = 8;
  const bool same_on_ranks = !ranks_ || run.role == Role::parameter;  // [Note: gathered]
  if (same_on_ranks && frame.first_page >= run.stream_page &&
      run.stream_use + kLargestGroup >= timeline_.plan().uses()) {
    time = AccessPlan::time_of_page(run.stream_begin, run.stream_end, frame.first_page, run.pages.size());
  }
  victims_.insert(frame, time, static_cast<int>(dirty) + static_cast<int>(is_read));
}

/// Where the plan is another one, what leaves next is too.
void FrameCache::plan_anew() {
  if (planned_at_ == timeline_.plan().surprises() ||
      timeline_.plan().uses() - uses_when_planned_ < victims_.size() / 4)
    return;
  planned_at_ = timeline_.plan().surprises();
  uses_when_planned_ = timeline_.plan().uses();
  victims_.for_each([this](Frame& frame) { consider(frame); });
}

/// Evicts neighbours that together with the holes between them make `bytes`. True if there is something new to look
/// at: they have left, or are being written.
bool FrameCache::clear_window(std::size_t bytes, AccessPlan::Time before, bool clean_only, Lock& lock) {
  const auto frames = memory_.window(bytes, [&](const Frame& frame) {
    return frame.cost >= 0 && frame.next_use > before && (!clean_only || !is_dirty(frame));
  });
  std::vector<Frame*> dirty;
  for (Frame* frame : frames) is_dirty(*frame) ? dirty.push_back(frame) : evict_frame(*frame);
  const bool blocks = home_->blocks();
  for (Frame* frame : dirty) {
    write_back(lock, *frame, Priority::demanded);
    if (blocks) break;  // the lock was given up: what lies where has to be looked at anew
  }
  return !frames.empty();
}

/// Where there is no plan: once memory is short, what would leave next is kept on its way home.
void FrameCache::clean_behind(Lock& lock) noexcept {
  const std::size_t limit = memory_.budget().limit();
  if (timeline_.plan().knows() || ranks_ || failed_write_ || memory_.free() > limit / 2) return;
  try {
    while (victims_.bytes(1) + writing_bytes_ < limit / kBehindShare) {
      Frame* const victim = victims_.first(2);
      if (!victim || !write_back(lock, *victim, Priority::behind) || failed_write_) return;
    }
  } catch (...) {
    // What could not start behind starts again when its memory is needed, and its error is told then.
  }
}

}  // namespace zeropage
