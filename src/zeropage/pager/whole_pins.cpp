#include "zeropage/pager/whole_pins.h"

#include <algorithm>
#include <tuple>

#include "zeropage/base/units.h"

namespace zeropage {

namespace {

/// Whether no page must first be saved for a checkpoint or get room at home.
bool is_writable(const Run& run) {
  for (std::size_t i = 0; run.is_on_disk && i < run.pages.size(); ++i) {
    if (!run.has_slot_to_write(i)) return false;
  }
  for (std::size_t i = 0; run.frozen && i < run.pages.size(); ++i) {
    if (run.is_owed(i)) return false;
  }
  return true;
}

}  // namespace

/// A run that an operator needs whole, and the frame that holds it or will hold it.
struct WholePins::Hold {
  Run* run;
  bool read;  // false: the operator overwrites all of it
  bool write;
  Frame* frame = nullptr;
  bool is_new = false;
};

std::vector<WholePins::Hold> WholePins::holds_for(std::span<const PinRequest> requests) const {
  std::vector<Hold> holds;
  std::size_t needed = 0;
  for (const PinRequest& request : requests) {
    Run& run = *request.segment->run_;
    const bool read = request.access != Access::overwrite || run.shares_page();
    const auto known = std::find_if(holds.begin(), holds.end(), [&](const Hold& hold) { return hold.run == &run; });
    const bool write = request.access != Access::read;
    if (known != holds.end()) {
      known->read |= read;
      known->write |= write;
      continue;
    }
    holds.push_back({&run, read, write});
    if (run.home) needed += round_up(run.bytes, kBlockBytes);
  }
  if (needed > budgets_.device_limit()) budgets_.refuse(needed);
  // All threads take runs in the same order, so none waits for a run whose reader waits for it. All ranks do too,
  // since they know gathered runs by number.
  const auto key = [](const Hold& hold) { return std::tuple(~hold.run->bytes, hold.run->number, hold.run->ordinal); };
  std::sort(holds.begin(), holds.end(), [&](const Hold& a, const Hold& b) { return key(a) < key(b); });
  return holds;
}

/// Whether operators hold all these gathered tensors already, as in a module whose parts run on different ranks. An
/// operator that uses them there may run on one rank only.
bool WholePins::is_of_one_rank(std::span<const PinRequest> requests) const {
  return frames_.is_gathered() && std::ranges::all_of(requests, [](const PinRequest& request) {
           const Frame* frame = request.segment->run_->whole_frame();
           return frame && frame->whole_pins > 0;
         });
}

/// Whether each is in one usable frame, and the budget lets operators hold all of them.
bool WholePins::is_resident(std::span<const PinRequest> requests) const {
  std::size_t more = 0;
  for (const PinRequest& request : requests) {
    const Run& run = *request.segment->run_;
    const Frame* frame = run.whole_frame();
    if (!frame || frame->failure || run.lent > 0) return false;
    if (request.access != Access::read && !is_writable(run)) return false;
    if (frame->permanent) continue;
    if (frame->transfers > 0) return false;
    if (frame->whole_pins == 0) more += frame->memory.bytes();
  }
  return more == 0 || budgets_.can_hold(more);
}

void WholePins::pin(std::span<const PinRequest> requests) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  const auto is_closed = [](const PinRequest& r) { return r.segment->run_->is_closed_to_this_thread(); };
  if (std::any_of(requests.begin(), requests.end(), is_closed)) throw VersionOpen();
  const bool counts = Timeline::has_uses(requests) && !is_of_one_rank(requests);
  if (counts && timeline_.record_use(requests, /*whole=*/true, monitor_.worked_seconds())) ahead_.restart();
  const auto begin = Trace::is_on() ? Trace::Clock::now() : Trace::Time();
  std::vector<Hold> holds;
  if (!is_resident(requests)) {
    holds = holds_for(requests);
    try {
      hold(lock, holds);
    } catch (const Shortage&) {
      // Frames that this operator holds may split the memory it needs. Move everything out and place it anew.
      let_go(holds);
      for (Hold& hold : holds) hold = {hold.run, hold.read, hold.write};
      try {
        room_.empty(lock);
        hold(lock, holds);
      } catch (const Shortage&) {
        let_go(holds);
        std::size_t needed = 0;
        for (const Hold& hold : holds) needed += hold.run->home ? round_up(hold.run->bytes, kBlockBytes) : 0;
        budgets_.refuse(needed);
      } catch (...) {
        let_go(holds);
        throw;
      }
    } catch (...) {
      let_go(holds);
      throw;
    }
    for (Hold& hold : holds) commit(hold);
    // A missed page had no frame; a late one was being read.
    if (begin != Trace::Time()) {
      const bool missed = std::any_of(holds.begin(), holds.end(), [](const Hold& hold) { return hold.is_new; });
      Trace::span("fault", missed ? "missed" : "late", begin, Trace::Clock::now());
    }
  }
  for (const PinRequest& request : requests) {
    Segment& segment = *request.segment;
    Run& run = *segment.run_;
    Frame& frame = *run.whole_frame();
    if (!frame.permanent) {
      for (std::size_t i = 0; i < run.pages.size(); ++i) Frames::mark(run, i, request.access);
    } else if (request.access != Access::read) {
      ++run.changes;
    }
    memory_.order_after(frame);
    frames_.add_pin(frame);
    if (frame.whole_pins++ == 0 && !frame.permanent) budgets_.hold(frame.memory.bytes());
    if (segment.pins_++ == 0) segment.expose(frame.memory.data() + segment.offset_);
  }
  for (Hold& hold : holds) frames_.drop_pin(*hold.frame);
  budgets_.note_usage();
  if (counts) ahead_.run(lock);
}

void WholePins::write_again(Segment& segment) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run_;
  make_writable(lock, run);
  for (std::size_t i = 0; !run.whole_frame()->permanent && i < run.pages.size(); ++i) {
    Frames::mark(run, i, Access::write);
  }
}

void WholePins::make_writable(Lock& lock, Run& run) {
  for (std::size_t i = 0; i < run.pages.size(); ++i) transfers_.make_writable(lock, run, i);
}

/// Gathers every run into one frame and pins that frame. On an error the caller drops the pins.
void WholePins::hold(Lock& lock, std::vector<Hold>& holds) {
  for (Hold& hold : holds) take_frame(lock, hold);
  for (Hold& hold : holds) {
    if (!hold.is_new) continue;
    ++faults_;
    if (hold.read) transfers_.start_reads(lock, *hold.frame, Priority::demanded);
  }
  wait_for_content(lock, holds);
  // The budget limits what operators hold at once, even if more memory is free.
  std::size_t more = 0;
  for (const Hold& hold : holds)
    more += hold.run->home && hold.frame->whole_pins == 0 ? hold.frame->memory.bytes() : 0;
  if (!budgets_.can_hold(more)) throw Shortage{};
  for (Hold& hold : holds) fill(hold);
}

void WholePins::take_frame(Lock& lock, Hold& hold) {
  Run& run = *hold.run;
  while (true) {
    transfers_.wait_until(lock, [&] { return run.assembled == nullptr && run.lent == 0; });
    if (Frame* frame = run.whole_frame()) {
      frames_.add_pin(*frame);
      hold.frame = frame;
      return;
    }
    Frame& frame = room_.make_frame(lock, run, 0, run.pages.size());
    frame.assembling = true;
    if (run.assembled || run.lent > 0 || run.whole_frame()) {  // another thread was quicker
      frames_.drop_pin(frame);
      continue;
    }
    run.assembled = &frame;
    hold.frame = &frame;
    hold.is_new = true;
    return;
  }
}

/// Returns when all reads have ended and nothing uses single pages of the new frames' runs. It keeps the lock from
/// its last look until it returns.
void WholePins::wait_for_content(Lock& lock, std::vector<Hold>& holds) {
  const auto in_use = [](const Hold& hold) {
    return hold.is_new && std::any_of(hold.run->pages.begin(), hold.run->pages.end(), [&](const Page& page) {
             return page.frame && page.frame != hold.frame && (page.frame->pins > 0 || page.frame->transfers > 0);
           });
  };
  // A read of the page into another frame may have failed, or that frame may have left. Then the page is still
  // missing.
  const auto misses = [](const Hold& hold) {
    return hold.is_new && hold.read &&
           std::any_of(hold.run->pages.begin(), hold.run->pages.end(),
                       [](const Page& page) { return !page.frame && page.state == Residency::evicted; });
  };
  for (std::size_t i = 0; i < holds.size(); ++i) {
    Hold& hold = holds[i];
    if (hold.frame->failure) std::rethrow_exception(hold.frame->failure);
    if (Frames::is_reading(*hold.frame)) {
      transfers_.wait_for_reads(lock, *hold.frame);
    } else if (in_use(hold)) {
      const auto reading = std::find_if(hold.run->pages.begin(), hold.run->pages.end(), [&](const Page& page) {
        return page.frame && page.frame != hold.frame && Frames::is_reading(*page.frame);
      });
      reading != hold.run->pages.end() ? transfers_.wait_for_reads(lock, *reading->frame)
                                       : transfers_.wait_until(lock, [&] { return !in_use(hold); });
    } else if (misses(hold)) {
      transfers_.start_reads(lock, *hold.frame, Priority::demanded);
    } else if (hold.write && !is_writable(*hold.run)) {
      make_writable(lock, *hold.run);
    } else {
      continue;
    }
    i = ~std::size_t{0};  // restart with the first
  }
}

/// Fills a new frame from other frames, or with zeros. All that can fail happens here, before any page's state
/// changes.
void WholePins::fill(Hold& hold) {
  if (!hold.is_new) return;
  Run& run = *hold.run;
  Frame& frame = *hold.frame;
  memory_.order_after(frame);
  const bool promises = !hold.read && !run.has_version;  // [Note: overwriting]
  if (promises) frame.promised.resize(run.pages.size(), Residency::clean);
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    const Page& page = run.pages[i];
    if (promises && !page.frame) frame.promised[i] = page.state;
    std::byte* const into = frame.memory.data() + i * run.page_bytes;
    if (page.frame == &frame) continue;
    if (page.frame) {
      memory_.order_after(*page.frame);
      memory_.copy(into, FrameMemory::address(run, i), run.bytes_of(i));
      memory_.mark_used(*page.frame);
    } else if (page.state == Residency::zero && hold.read) {
      memory_.clear(into, run.bytes_of(i));
    }
  }
  if (memory_.device()) frame.ready = memory_.device()->record();
}

/// Moves all pages of the run to its new frame.
void WholePins::commit(Hold& hold) noexcept {
  if (!hold.is_new) return;
  Run& run = *hold.run;
  Frame& frame = *hold.frame;
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    Page& page = run.pages[i];
    if (page.frame == &frame) continue;
    Frame* const other = std::exchange(page.frame, &frame);
    if (other) {
      const auto behind = run.pages.begin() + static_cast<std::ptrdiff_t>(i) + 1;
      const auto end = run.pages.begin() + static_cast<std::ptrdiff_t>(other->first_page + other->pages);
      if (std::none_of(behind, end, [&](const Page& p) { return p.frame == other; })) frames_.drop(*other);
    } else if (page.state == Residency::zero) {
      page.state = run.gathered() ? Residency::clean : Residency::dirty;
    } else {
      page.state = Residency::clean;  // it is about to be overwritten
    }
  }
  frame.assembling = false;
  run.assembled = nullptr;
  monitor_.changed().notify_all();
}

void WholePins::let_go(std::vector<Hold>& holds) noexcept {
  for (Hold& hold : holds) {
    if (!hold.frame) continue;
    if (hold.is_new) hold.run->assembled = nullptr;  // the frame stays `assembling`, so it is dropped
    frames_.drop_pin(*std::exchange(hold.frame, nullptr));
  }
  monitor_.changed().notify_all();
}

void WholePins::unpin(std::span<const PinRequest> requests, std::uint64_t thread, bool failed) noexcept {
  if (monitor_.in_forked_child()) return;
  Lock lock(monitor_.mutex());
  for (const PinRequest& request : requests) {
    Segment& segment = *request.segment;
    if (--segment.pins_ == 0) segment.hide();
    Frame& frame = *segment.run_->whole_frame();
    try {
      memory_.mark_used(frame);
    } catch (...) {  // a device that cannot record an event has lost its results too
    }
    if (--frame.whole_pins == 0 && !frame.permanent) budgets_.let_go(frame.memory.bytes());
    if (request.access != Access::read && !failed) frame.promised.clear();
    frames_.drop_pin(frame, thread);
  }
  if (monitor_.closed()) return;
  room_.clean_behind(lock);
  if (!frames_.is_gathered()) ahead_.run(lock);
}

}  // namespace zeropage
