#include "zeropage/pager/cache/frames.h"

#include <algorithm>

namespace zeropage {

Frame* Frames::try_make(Run& run, std::size_t first_page, std::size_t pages, bool for_long, bool must,
                        bool& fragmented) {
  ThreadUse& use = entry_of_this_thread();  // may throw: before there is a frame
  Frame* const frame = memory_.try_make(run, first_page, pages, for_long, must, fragmented);
  if (!frame) return drop_if_unused(use), nullptr;
  count_pin(use, *frame, /*is_first=*/true);
  budgets_.note_usage();
  return frame;
}

Frames::ThreadUse* Frames::find_use(std::uint64_t thread) noexcept {
  const auto found = std::ranges::find(uses_, thread, &ThreadUse::thread);
  return found == uses_.end() ? nullptr : &*found;
}

Frames::ThreadUse Frames::use_of_this_thread() const {
  const auto found = std::ranges::find(uses_, this_thread_number(), &ThreadUse::thread);
  return found == uses_.end() ? ThreadUse{this_thread_number()} : *found;
}

Frames::ThreadUse& Frames::entry_of_this_thread() {
  ThreadUse* const known = find_use(this_thread_number());
  return known ? *known : uses_.emplace_back(ThreadUse{this_thread_number()});
}

void Frames::drop_if_unused(ThreadUse& use) noexcept {
  if (use.pins > 0 || use.claimed > 0 || use.lasting > 0 || use.pinned > 0) return;
  use = uses_.back();
  uses_.pop_back();
}

void Frames::claim(std::size_t bytes) {
  if (bytes == 0) return;
  ThreadUse& use = entry_of_this_thread();
  if (use.claimed == 0) use.before = use.pinned, use.beyond = 0;
  use.claimed += bytes;
}

void Frames::end_claim(std::size_t bytes, std::uint64_t thread) noexcept {
  ThreadUse* const use = find_use(thread);
  if (!use) return;
  use->claimed -= std::min(use->claimed, bytes);
  drop_if_unused(*use);
  monitor_.changed().notify_all();
}

void Frames::end_spent_claim(std::size_t bytes) noexcept {
  if (ThreadUse* const use = find_use(this_thread_number())) use->beyond += std::min(bytes, use->spent());
  end_claim(bytes, this_thread_number());
}

void Frames::count_lasting(std::size_t pins) { entry_of_this_thread().lasting += pins; }

void Frames::end_lasting(std::size_t pins, std::uint64_t thread) noexcept {
  ThreadUse* const use = find_use(thread);
  if (!use) return;
  use->lasting -= std::min(use->lasting, pins);
  drop_if_unused(*use);
  monitor_.changed().notify_all();
}

void Frames::count_bytes(const Frame& frame) noexcept {
  pinned_bytes_ += frame.memory.bytes();
  if (ThreadUse* const use = find_use(frame.charged)) use->pinned += frame.memory.bytes();
}

void Frames::uncount_bytes(const Frame& frame) noexcept {
  pinned_bytes_ -= frame.memory.bytes();
  ThreadUse* const use = find_use(frame.charged);
  if (!use) return;
  use->pinned -= std::min(use->pinned, frame.memory.bytes());
  use->beyond -= std::min(use->beyond, frame.memory.bytes());
  drop_if_unused(*use);
}

void Frames::count_pin(ThreadUse& use, Frame& frame, bool is_first) noexcept {
  ++use.pins, ++pins_;
  if (!is_first) return;
  frame.charged = this_thread_number();
  if (!frame.permanent) count_bytes(frame);
}

void Frames::set_permanent(Frame& frame, bool permanent) noexcept {
  if (frame.permanent == permanent) return;
  frame.permanent = permanent;
  if (frame.pins > 0) permanent ? uncount_bytes(frame) : count_bytes(frame);
}

void Frames::add_pin(Frame& frame) {
  count_pin(entry_of_this_thread(), frame, frame.pins == 0);
  if (std::exchange(frame.ahead, false)) ahead_bytes_ -= frame.memory.bytes();
  victims_.remove(frame);
  ++frame.pins;
}

void Frames::drop_pin(Frame& frame, std::uint64_t thread) noexcept {
  --pins_;
  monitor_.changed().notify_all();
  if (--frame.pins == 0 && !frame.permanent) uncount_bytes(frame);
  if (ThreadUse* const use = find_use(thread)) {
    --use->pins;
    drop_if_unused(*use);
  }
  if (frame.pins > 0) return;
  break_promises(frame);
  frame.last_use = timeline_.now();
  if (frame.transfers == 0) settle(frame);
  if (monitor_.closed()) monitor_.left();
}

void Frames::settle(Frame& frame) noexcept {
  if (frame.permanent) return;
  if (!frame.run) return gathered_ && !frame.failure ? consider(frame) : drop(frame);  // [Note: gathered]
  if ((frame.failure || frame.assembling) && !is_dirty(frame)) {
    for (std::size_t i = frame.first_page; i < frame.first_page + frame.pages; ++i) {
      Page& page = frame.run->pages[i];
      if (page.frame == &frame && page.state == Residency::clean) page.state = Residency::evicted;
    }
    return drop(frame);
  }
  consider(frame);
}

void Frames::forget(const Frame& frame) noexcept {
  for (std::size_t i = 0; frame.run && i < frame.pages; ++i) {
    Page& page = frame.run->pages[frame.first_page + i];
    if (page.frame == &frame) page.frame = nullptr;
  }
}

void Frames::drop(Frame& frame) noexcept {
  forget(frame);
  if (frame.ahead) ahead_bytes_ -= frame.memory.bytes();
  victims_.remove(frame);
  memory_.drop(frame);
  monitor_.changed().notify_all();
}

bool Frames::is_reading(const Frame& frame) {
  if (!frame.run || frame.transfers == 0) return false;
  const auto first = frame.run->pages.begin() + static_cast<std::ptrdiff_t>(frame.first_page);
  return std::any_of(first, first + static_cast<std::ptrdiff_t>(frame.pages),
                     [&](const Page& page) { return page.frame == &frame && page.state == Residency::reading; });
}

bool Frames::is_of_one_rank(std::span<const PinRequest> requests) const {
  return std::ranges::all_of(requests, [&](const PinRequest& r) { return is_of_one_rank(*r.segment->run()); });
}

bool Frames::is_of_one_rank(const Run& run) const {
  const Frame* const frame = gathered_ ? run.whole_frame() : nullptr;
  return frame && frame->whole_pins > 0;
}

bool Frames::is_dirty(const Frame& frame) {
  if (!frame.run) return false;
  const auto first = frame.run->pages.begin() + static_cast<std::ptrdiff_t>(frame.first_page);
  return std::any_of(first, first + static_cast<std::ptrdiff_t>(frame.pages),
                     [&](const Page& page) { return page.frame == &frame && page.state == Residency::dirty; });
}

void Frames::evict(Frame& frame) {
  for (std::size_t i = 0; frame.run && i < frame.pages; ++i) {
    Page& page = frame.run->pages[frame.first_page + i];
    if (page.frame == &frame) page.state = Residency::evicted;
  }
  if (frame.next_use < looked_ahead_.reached) looked_ahead_.again = true;
  drop(frame);
  ++evictions_;
}

void Frames::promise(Run& run, std::size_t page) {
  const Residency state = run.pages[page].state;
  Frame& frame = *run.pages[page].frame;
  if (frame.permanent || run.has_version || (state != Residency::evicted && state != Residency::zero)) return;
  frame.promised.resize(frame.pages, Residency::clean);
  frame.promised[page - frame.first_page] = state;
}

void Frames::keep_promise(Frame& frame, std::size_t page) {
  if (!frame.promised.empty()) frame.promised[page - frame.first_page] = Residency::clean;
}

void Frames::break_promises(Frame& frame) noexcept {
  for (std::size_t i = 0; frame.run && i < frame.promised.size(); ++i) {
    Page& page = frame.run->pages[frame.first_page + i];
    const bool has_content = page.state == Residency::dirty || page.state == Residency::clean;
    if (frame.promised[i] == Residency::clean || page.frame != &frame || !has_content) continue;
    page.state = frame.promised[i];
    page.frame = nullptr;
    frame.assembling = true;  // not all of its pages point to it
  }
  frame.promised.clear();
  frame.reverting = false;
}

/// Queues a frame that could leave.
void Frames::consider(Frame& frame) noexcept {
  if (frame.permanent || frame.pins > 0 || frame.transfers > 0) return;
  const bool dirty = is_dirty(frame);
  const auto next = timeline_.plan().next_use(frame.ordinal);
  bool is_read = next.access != Access::overwrite || frame.shares_page;
  AccessPlan::Time time = frame.transient ? AccessPlan::kNever - 1 : VictimQueue::unplanned(frame.last_use);
  if (next.begin != AccessPlan::kNever) {
    time = AccessPlan::time_of_page(next.begin, next.end, frame.first_page, frame.run_pages);
  }
  if (!frame.run) return victims_.insert(frame, time, static_cast<int>(is_read));
  const Run& run = *frame.run;
  // In a stream of pages, those that have not been taken yet are used next.
  constexpr std::size_t kLargestGroup = 8;
  const bool same_on_ranks = !gathered_ || run.role == Role::parameter;  // [Note: gathered]
  if (run.stream_lasts && frame.first_page >= run.lasting_page) {
    time = timeline_.now() + (frame.first_page - run.lasting_page) * run.page_bytes;
    is_read = true;
  } else if (same_on_ranks && frame.first_page >= run.stream_page &&
             run.stream_use + kLargestGroup >= timeline_.plan().uses()) {
    time = AccessPlan::time_of_page(run.stream_begin, run.stream_end, frame.first_page, run.pages.size());
    is_read = true;  // unless the stream overwrites, which the frame does not know
  }
  if (frame.ahead && frame.ahead_in == timeline_.plan().surprises() && frame.ahead_for >= timeline_.now()) {
    time = std::min(time, frame.ahead_for);
  }
  victims_.insert(frame, time, static_cast<int>(dirty) + static_cast<int>(is_read));
}

void Frames::give_up(Frame& frame) {
  for (std::size_t i = 0; i < frame.pages; ++i) {
    Page& page = frame.run->pages[frame.first_page + i];
    if (page.frame == &frame && page.state != Residency::zero) page.state = Residency::evicted;
  }
  drop(frame);
}

void Frames::set_ahead(Frame& frame, AccessPlan::Time time) {
  frame.ahead = true;
  frame.ahead_for = time;
  frame.ahead_in = timeline_.plan().surprises();
  ahead_bytes_ += frame.memory.bytes();
}

void Frames::plan_anew() {
  if (planned_at_ == timeline_.plan().surprises() ||
      timeline_.plan().uses() - uses_when_planned_ < victims_.size() / 4)
    return;
  planned_at_ = timeline_.plan().surprises();
  uses_when_planned_ = timeline_.plan().uses();
  victims_.for_each([this](Frame& frame) { consider(frame); });
}

void Frames::plan_anew(const Run& run) noexcept {
  for (const Page& page : run.pages) {
    if (page.frame && page.frame->cost >= 0) consider(*page.frame);
  }
}

void Frames::drop_unused() noexcept {
  for (auto next = memory_.frames().begin(); next != memory_.frames().end();) {
    Frame& frame = *(next++)->second;
    if (frame.pins > 0 || frame.transfers > 0) continue;
    forget(frame);
    victims_.remove(frame);
    memory_.drop(frame);
  }
}

}  // namespace zeropage
