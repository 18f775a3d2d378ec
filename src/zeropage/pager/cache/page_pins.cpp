#include "zeropage/pager/cache/page_pins.h"

#include <exception>

#include "zeropage/base/units.h"

namespace zeropage {

/// A pin that this thread has taken on the frame of a page, until a PagePin has it. Under the lock.
class PagePins::Taken {
 public:
  Taken() = default;
  Taken(Frames& frames, Frame& frame, const Page& page) : frames_(&frames), frame_(&frame), page_(&page) {}
  Taken(Taken&& other) noexcept
      : frames_(other.frames_), frame_(std::exchange(other.frame_, nullptr)), page_(other.page_) {}
  Taken& operator=(Taken&&) = delete;
  ~Taken() {
    if (!frame_) return;
    give_back_unused(*frame_, *page_);
    frames_->drop_pin(*frame_);
  }
  Frame* frame() const { return frame_; }
  Frame* release() { return std::exchange(frame_, nullptr); }

 private:
  Frames* frames_ = nullptr;
  Frame* frame_ = nullptr;
  const Page* page_ = nullptr;
};

void PagePins::announce(std::span<const PinRequest> requests) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  const bool uses = Timeline::has_uses(requests) && !frames_.is_of_one_rank(requests);
  if (uses && timeline_.record_use(requests, /*whole=*/false, monitor_.worked_seconds())) ahead_.restart();
  if (!frames_.is_gathered()) ahead_.run(lock);
}

void PagePins::open_stream(std::span<const PinRequest> requests) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  ahead_.open_stream(requests);
  ahead_.run(lock);
}

void PagePins::hurry_stream(const Segment& segment) {
  if (monitor_.in_forked_child()) return;
  const Lock lock(monitor_.mutex());
  if (!monitor_.closed() && segment.run()) ahead_.hurry_stream(*segment.run());
}

void PagePins::close_stream(std::span<const PinRequest> requests) noexcept {
  if (monitor_.in_forked_child()) return;
  const Lock lock(monitor_.mutex());
  if (monitor_.closed()) return;
  for (const PinRequest& request : requests) {
    const Run* const run = request.segment->run();
    if (!run || !run->stream_lasts) continue;
    ahead_.close_stream(*run);
    frames_.plan_anew(*run);
  }
}

void PagePins::reach_in_stream(const Segment& segment, std::size_t page, bool begun) noexcept {
  if (monitor_.in_forked_child()) return;
  const Lock lock(monitor_.mutex());
  if (!monitor_.closed() && segment.run()) ahead_.reach_in_stream(*segment.run(), page, begun);
}

Grants::Claim PagePins::claim(Lock& lock, std::span<const PinRequest> requests) {
  // A walk holds two pages of each where it crosses an edge. A run that is whole in memory is held whole.
  const auto need = [&] {
    std::size_t bytes = 0;
    for (const PinRequest& request : requests) {
      const Run& run = *request.segment->run();
      const Frame* const whole = run.whole_frame();
      if (!run.home || (whole && whole->pins > 0)) continue;
      const bool is_whole = run.pages.size() <= 2 || whole;
      bytes += is_whole ? round_up(run.bytes, kBlockBytes) : 2 * round_up(run.page_bytes, kBlockBytes);
    }
    // A smaller memory may do. A pin that it cannot hold says so.
    const std::size_t most = memory_.budget().limit(),
                      taken = budgets_.all_homes() + frames_.use_of_this_thread().pinned;
    return Grants::Need{std::min(bytes, most - std::min(most, taken)), 0};
  };
  // With pins already, and over ranks, the caller asks for each page instead of waiting here.
  if ((frames_.use_of_this_thread().pins > 0 || grants_.is_below_ranks()) && !grants_.fits(need())) return {};
  return grants_.wait_for(lock, need);
}

/// The bytes in use that a pin of the page adds.
Grants::Need PagePins::need_of(const Run& run, std::size_t index) {
  if (const Frame* const frame = run.pages[index].frame) {
    return {frame->pins > 0 || frame->permanent ? 0 : frame->memory.bytes(), 0};
  }
  return {FrameMemory::bytes_of(run, index, 1), 0};
}

/// Tells the plan where the program is in a stream.
void PagePins::note_page(Run& run, std::size_t index) {
  if (!frames_.is_of_one_rank(run)) timeline_.note_page(run, index);
}

PagePin PagePins::pin(Segment& segment, std::size_t index, Access access) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  Run& run = *segment.run();
  note_page(run, index);
  if (access == Access::overwrite && run.shares_page()) access = Access::write;  // neighbours share the page
  for (bool is_alone = false;;) {
    monitor_.check_usable();
    try {
      if (Taken taken = try_take_frame(lock, run, index, access); taken.frame()) {
        return wrap(taken, segment, index, access);
      }
    } catch (const Shortage&) {
      // As in WholePins::pin().
      if (grants_.wait_for_others(lock)) continue;
      if (std::exchange(is_alone, true)) {
        budgets_.refuse_pages(FrameMemory::bytes_of(run, index, 1), frames_.pinned_bytes(), "");
      }
      room_.empty(lock);
    }
  }
}

/// A pin on the page's frame. Empty if it must be looked at again. Throws Shortage.
PagePins::Taken PagePins::try_take_frame(Lock& lock, Run& run, std::size_t index, Access access) {
  Page& page = run.pages[index];
  pass(transfers_, lock, run, index, Intent::pin);
  const Grants::Claim claim = grants_.wait_for(lock, [&] { return need_of(run, index); });
  if (obstacle(run, index, Intent::pin) != Obstacle::none) return {};
  const bool is_claimed = page.frame && (page.state == Residency::evicted || page.state == Residency::zero);
  Frame* frame = page.frame;
  if (frame) {
    frames_.add_pin(*frame);
  } else {
    frame = &room_.make_frame(lock, run, index, 1);
    if (page.frame || obstacle(run, index, Intent::pin) != Obstacle::none) {  // another thread was quicker
      frame->assembling = true;
      frames_.drop_pin(*frame);
      return {};
    }
    ++faults_;
    page.frame = frame;
    frame->claimer = std::this_thread::get_id();
  }
  Taken taken(frames_, *frame, page);
  const bool is_own = is_claimed || frame->claimer == std::this_thread::get_id();
  if (is_own && access != Access::overwrite) bring_claimed(lock, run, index);
  return taken;
}

/// Reads or clears a page that this thread has claimed and pinned: its content is needed after all.
void PagePins::bring_claimed(Lock& lock, Run& run, std::size_t index) {
  Page& page = run.pages[index];
  Frame& frame = *page.frame;
  if (page.state == Residency::zero) {
    if (memory_.device()) {
      memory_.clear(frame.memory.data(), frame.memory.bytes());
      frame.ready = memory_.record();
    } else {
      frame.clearing = true;
      {
        const Inside inside(monitor_);
        const Unlocked unlocked(lock);
        memory_.clear(frame.memory.data(), frame.memory.bytes());
      }
      frame.clearing = false;
    }
    page.state = run.gathered() ? Residency::clean : Residency::dirty;
    frame.claimer = {};
    monitor_.changed().notify_all();
  } else if (page.state == Residency::evicted) {
    frame.claimer = {};
    transfers_.start_reads(lock, frame, Priority::demanded);
  }
}

PagePin PagePins::wrap(Taken& taken, Segment& segment, std::size_t index, Access access) {
  memory_.order_after(*taken.frame());  // may throw: before the PagePin, whose destructor takes the lock
  Frame& frame = *taken.release();
  PagePin pin;
  pin.pins_ = this;
  pin.run_ = segment.run();
  pin.page_ = index;
  pin.frame_ = &frame;
  pin.access_ = access;
  pin.thread_ = this_thread_number();
  pin.exceptions_ = std::uncaught_exceptions();
  pin.data_ = frame.memory.data() + (index - frame.first_page) * segment.run()->page_bytes + segment.offset();
  return pin;
}

PagePin PagePins::try_pin(Segment& segment, std::size_t index, Access access, Trying trying) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  Page& page = run.pages[index];
  if (obstacle(run, index, Intent::pin) != Obstacle::none) return {};
  const bool adds_nothing_for_long = trying.is_brief && page.frame;
  if (!adds_nothing_for_long && !grants_.fits(need_of(run, index))) return {};
  if (access == Access::overwrite && run.shares_page()) access = Access::write;
  const bool absent = page.state == Residency::evicted || page.state == Residency::zero;
  if (access != Access::read && !transfers_.try_make_writable(run, index)) return {};
  if (page.frame && !absent && page.state != Residency::reading) {
    note_page(run, index);
    frames_.add_pin(*page.frame);
    Taken taken(frames_, *page.frame, page);
    PagePin pin = wrap(taken, segment, index, access);
    if (trying.is_brief) pin.is_brief_ = true, frames_.count_brief(/*begins=*/true);
    return pin;
  }
  if (page.frame || run.assembled) return {};
  if (page.state == Residency::evicted && access != Access::overwrite && !trying.brings) return {};
  Frame* const frame = room_.try_make_frame(lock, run, index, 1, timeline_.now());
  if (!frame) return {};
  note_page(run, index);
  page.frame = frame;
  frame->claimer = std::this_thread::get_id();
  Taken taken(frames_, *frame, page);
  if (access != Access::overwrite) bring_claimed(lock, run, index);
  return wrap(taken, segment, index, access);
}

/// Before the pin is dropped: gives up the frame of a page that was claimed and not overwritten. Its content is at
/// home.
void PagePins::give_back_unused(Frame& frame, const Page& page) {
  const bool is_unused = page.frame == &frame && (page.state == Residency::evicted || page.state == Residency::zero);
  if (!is_unused || frame.pins > 1) return;
  frame.claimer = {};
  frame.assembling = true;
}

void PagePins::let_go(PagePin& pin, bool failed) noexcept {
  if (monitor_.in_forked_child()) return;
  Lock lock(monitor_.mutex());
  Frame& frame = *pin.frame_;
  if (pin.is_brief_) frames_.count_brief(/*begins=*/false);
  if (monitor_.closed()) return frames_.drop_pin(frame, pin.thread_);
  try {
    memory_.mark_used(frame);
  } catch (...) {  // as in WholePins::unpin()
  }
  if (frame.run) {
    give_back_unused(frame, pin.run_->pages[pin.page_]);
    if (pin.access_ != Access::read) failed ? Frames::begin_to_revert(frame) : Frames::keep_promise(frame, pin.page_);
    frame.transient = pin.will_not_reuse_;
  }
  frames_.drop_pin(frame, pin.thread_);
  room_.clean_behind(lock);
  if (!frames_.is_gathered()) ahead_.run(lock);
}

void PagePins::wait(PagePin& pin) {
  monitor_.check_usable();  // before the lock, which a fork may have copied in its locked state
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Frame& frame = *pin.frame_;
  transfers_.wait_for_reads(lock, frame);
  if (frame.failure && (!frame.run || frame.permanent || pin.run_->pages[pin.page_].frame != &frame)) {
    std::rethrow_exception(frame.failure);
  }
  memory_.order_after(frame);
  if (!frame.run || pin.access_ == Access::read) return;  // the tensor may have died after its read
  transfers_.wait_until(lock, [&] { return !frame.clearing; });
  transfers_.make_writable(lock, *pin.run_, pin.page_);
  begin_use(pin);
}

bool PagePins::try_wait(PagePin& pin) {
  monitor_.check_usable();
  const Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Frame& frame = *pin.frame_;
  if (Frames::is_reading(frame) || frame.failure || frame.clearing) return false;
  const bool writes = frame.run && pin.access_ != Access::read;
  if (writes && !transfers_.try_make_writable(*pin.run_, pin.page_)) return false;
  memory_.order_after(frame);
  if (writes) begin_use(pin);
  return true;
}

/// For a page that the pin's thread is about to write, and may.
void PagePins::begin_use(PagePin& pin) {
  Frame& frame = *pin.frame_;
  if (frame.permanent) return void(++pin.run_->changes);
  frame.claimer = {};
  Frames::promise(*pin.run_, pin.page_);
  Frames::mark(*pin.run_, pin.page_, pin.access_);
  monitor_.changed().notify_all();
}

void PagePins::wait_for_uses(const PagePin& pin) {
  if (!memory_.device()) return;
  const Lock lock(monitor_.mutex());
  if (pin.frame_->last_used) memory_.device()->stream_wait(pin.frame_->last_used);
}

void PagePins::written(PagePin& pin) {
  if (pin.access_ != Access::overwrite || std::exchange(pin.written_, true)) return;
  const Lock lock(monitor_.mutex());
  if (pin.frame_->run) Frames::keep_promise(*pin.frame_, pin.page_);
}

PagePin::~PagePin() {
  if (!frame_) return;
  const bool failed = !written_ && std::uncaught_exceptions() > exceptions_;
  if (failed && loan_) loan_->waited_for = false;
  pins_->let_go(*this, failed);
}

void PagePin::written() {
  if (frame_) pins_->written(*this);
}

void PagePin::wait() {
  if (frame_) pins_->wait(*this);
  if (loan_) loan_->waited_for = true;
}

bool PagePin::try_wait() {
  if (frame_ && !pins_->try_wait(*this)) return false;
  if (loan_) loan_->waited_for = true;
  return true;
}

void PagePin::wait_for_uses() {
  if (frame_) pins_->wait_for_uses(*this);
}

void PagePin::fill(const std::byte* from, std::size_t bytes, std::size_t offset) {
  pins_->memory_.copy(data_ + offset, from, bytes);
}

}  // namespace zeropage
