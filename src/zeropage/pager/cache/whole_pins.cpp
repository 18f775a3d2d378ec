#include "zeropage/pager/cache/whole_pins.h"

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

/// Whether operators or rules hold single pages of a run that is not whole in memory.
bool is_in_use_elsewhere(const Run& run) {
  return std::ranges::any_of(run.pages, [&, whole = run.whole_frame()](const Page& page) {
    return page.frame && page.frame != run.assembled && page.frame != whole && page.frame->pins > 0;
  });
}

/// Thrown where a thread should let go of its memory before it waits for these.
struct PagesInUse {
  const Run* run;
};

}  // namespace

/// A run that an operator needs whole, and the frame that holds it or will hold it.
struct WholePins::Hold {
  Run* run;
  bool read;  // false: the operator overwrites all of it
  bool write;
  Frame* frame = nullptr;
  bool is_new = false;
  std::vector<Frame*> sources = {};  // other frames with pages of the run, pinned until the new one has their content
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

/// Whether each is in one usable frame.
bool WholePins::is_resident(std::span<const PinRequest> requests) const {
  return std::ranges::all_of(requests, [](const PinRequest& request) {
    const Run& run = *request.segment->run_;
    const Frame* frame = run.whole_frame();
    if (!frame || frame->failure || frame->reverting || run.lent > 0) return false;
    if (request.access != Access::read && !is_writable(run)) return false;
    return frame->permanent || frame->transfers == 0;
  });
}

/// The bytes in use that pinning adds. Throws VersionOpen if another thread has a second version open.
Grants::Need WholePins::need_of(std::span<const PinRequest> requests, std::size_t extra) const {
  Grants::Need need;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Run& run = *requests[i].segment->run_;
    if (run.is_closed_to_this_thread()) throw VersionOpen();
    const auto is_same = [&](const PinRequest& other) { return other.segment->run_ == &run; };
    if (!run.home || std::ranges::any_of(requests.first(i), is_same)) continue;
    const Frame* const frame = run.whole_frame();
    const std::size_t bytes = round_up(run.bytes, kBlockBytes);
    if (!frame || frame->pins == 0) need.bytes += bytes;
    if (!frame || frame->whole_pins == 0) need.held += bytes;
  }
  // With less, the thread's later pins may have to wait.
  const std::size_t most = memory_.budget().limit();
  const std::size_t taken = budgets_.all_homes() + frames_.use_of_this_thread().pinned + need.bytes;
  need.extra = std::min(extra, most - std::min(most, taken));
  need.bytes += need.extra;
  return need;
}

std::size_t WholePins::pin(std::span<const PinRequest> requests, const PinOptions& options) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  const auto is_closed = [](const PinRequest& r) { return r.segment->run_->is_closed_to_this_thread(); };
  if (std::any_of(requests.begin(), requests.end(), is_closed)) throw VersionOpen();
  const bool counts = Timeline::has_uses(requests) && !frames_.is_of_one_rank(requests);
  if (counts && timeline_.record_use(requests, /*whole=*/true, monitor_.worked_seconds())) ahead_.restart();
  const auto begin = Trace::is_on() ? Trace::Clock::now() : Trace::Time();
  std::vector<Hold> holds;
  Grants::Claim claim;
  std::size_t extra = 0;
  const auto need = [&] {
    const Grants::Need wanted = need_of(requests, options.extra);
    extra = wanted.extra;
    return wanted;
  };
  for (bool is_alone = false;;) {
    holds.clear();
    claim = grants_.wait_for(lock, need);
    if (is_resident(requests)) break;
    holds = holds_for(requests);
    try {
      hold(lock, holds);
      // A frame that another operator held at the claim may be nobody's now.
      const std::size_t held = need_of(requests, 0).held;
      if (frames_.is_gathered() || held <= claim.held() || budgets_.can_hold(held - claim.held())) break;
      let_go(holds);
      claim = {};
    } catch (const PagesInUse& in_use) {
      // Another thread may need memory before it lets go of them, so this one lets go of its own.
      let_go(holds);
      claim = {};
      pass(transfers_, lock, *in_use.run, Intent::assemble);
      transfers_.wait_until(lock, [&] { return !is_in_use_elsewhere(*in_use.run); });
    } catch (const Shortage&) {
      // Memory is in pieces, and frames in use keep them apart. Waits for those of other threads; then moves all else
      // out and places everything anew.
      let_go(holds);
      claim = {};
      if (grants_.wait_for_others(lock)) continue;
      if (std::exchange(is_alone, true)) budgets_.refuse(need().bytes);
      room_.empty(lock);
    } catch (...) {
      let_go(holds);
      throw;
    }
  }
  for (Hold& hold : holds) commit(hold);
  // A missed page had no frame; a late one was being read.
  if (begin != Trace::Time() && !holds.empty()) {
    const bool missed = std::any_of(holds.begin(), holds.end(), [](const Hold& hold) { return hold.is_new; });
    Trace::span("fault", missed ? "missed" : "late", begin, Trace::Clock::now());
  }
  expose(requests, options, holds);
  claim = {};
  frames_.claim(extra);
  budgets_.note_usage();
  if (counts) ahead_.run(lock);
  return extra;
}

/// Hands the frames to the operator, all or none.
void WholePins::expose(std::span<const PinRequest> requests, const PinOptions& options, std::vector<Hold>& holds) {
  std::size_t done = 0;
  try {
    for (const PinRequest& request : requests) {
      Frame& frame = *request.segment->run_->whole_frame();
      memory_.order_after(frame);
      frames_.add_pin(frame);
      ++done;
    }
    if (options.lasting) frames_.count_lasting(requests.size());
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) frames_.drop_pin(*requests[i].segment->run_->whole_frame());
    let_go(holds);
    throw;
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
    if (frame.whole_pins++ == 0 && !frame.permanent) budgets_.hold(frame.memory.bytes());
    if (segment.pins_++ == 0) segment.expose(frame.memory.data() + segment.offset_);
  }
  for (Hold& hold : holds) frames_.drop_pin(*hold.frame);
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
  fill(lock, holds);
}

void WholePins::take_frame(Lock& lock, Hold& hold) {
  Run& run = *hold.run;
  while (true) {
    if (frames_.is_gathered()) {
      pass(transfers_, lock, run, Intent::assemble);
    } else if (obstacle(run, Intent::assemble) != Obstacle::none) {
      throw PagesInUse{&run};
    }
    if (Frame* frame = run.whole_frame()) {
      frames_.add_pin(*frame);
      hold.frame = frame;
      return;
    }
    if (!frames_.is_gathered() && is_in_use_elsewhere(run)) throw PagesInUse{&run};
    Frame& frame = room_.make_frame(lock, run, 0, run.pages.size());
    frame.assembling = true;
    if (run.whole_frame() || obstacle(run, Intent::assemble) != Obstacle::none) {  // another thread was quicker
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
    // Not before all its reads have ended: until then, the next attempt would meet the same frame and its error.
    if (hold.frame->failure && !Frames::is_reading(*hold.frame)) std::rethrow_exception(hold.frame->failure);
    if (hold.is_new && !frames_.is_gathered() && is_in_use_elsewhere(*hold.run)) {
      throw PagesInUse{hold.run};
    } else if (Frames::is_reading(*hold.frame)) {
      transfers_.wait_for_reads(lock, *hold.frame);
    } else if (in_use(hold)) {
      const auto reading = std::find_if(hold.run->pages.begin(), hold.run->pages.end(), [&](const Page& page) {
        return page.frame && page.frame != hold.frame && Frames::is_reading(*page.frame);
      });
      if (reading != hold.run->pages.end()) {
        transfers_.wait_for_reads(lock, *reading->frame);
      } else {
        transfers_.hurry_writes(lock, *hold.run);
        transfers_.wait_until(lock, [&] { return !in_use(hold); }, Cause::content);
      }
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

/// Fills new frames from other frames, or with zeros, without the lock. All that can fail happens here, before any
/// page's state changes.
void WholePins::fill(Lock& lock, std::vector<Hold>& holds) {
  struct Piece {
    std::byte* to;
    const std::byte* from;  // null: zeros
    std::size_t bytes;
  };
  std::vector<Piece> pieces;
  for (Hold& hold : holds) {
    if (!hold.is_new) continue;
    Run& run = *hold.run;
    Frame& frame = *hold.frame;
    memory_.order_after(frame);
    const bool promises = !hold.read && !run.has_version;  // [Note: overwriting]
    if (promises) frame.promised.resize(run.pages.size(), Residency::clean);
    hold.sources.reserve(run.pages.size());
    for (std::size_t i = 0; i < run.pages.size(); ++i) {
      const Page& page = run.pages[i];
      if (promises && !page.frame) frame.promised[i] = page.state;
      std::byte* const into = frame.memory.data() + i * run.page_bytes;
      if (page.frame == &frame) continue;
      if (page.frame) {
        if (hold.sources.empty() || hold.sources.back() != page.frame) {
          frames_.add_pin(*page.frame);
          hold.sources.push_back(page.frame);
        }
        pieces.push_back({into, FrameMemory::address(run, i), run.bytes_of(i)});
      } else if (page.state == Residency::zero && hold.read) {
        pieces.push_back({into, nullptr, run.bytes_of(i)});
      }
    }
  }
  for (Hold& hold : holds) {
    for (Frame* source : hold.sources) memory_.order_after(*source);
  }
  const auto copy = [&] {
    for (const Piece& piece : pieces) {
      piece.from ? memory_.copy(piece.to, piece.from, piece.bytes) : memory_.clear(piece.to, piece.bytes);
    }
  };
  if (memory_.device() || pieces.empty()) {
    copy();
  } else {
    // Nobody may freeze any of the runs: that they are writable was looked at before.
    for (Hold& hold : holds) ++hold.run->filling;
    {
      const Inside inside(monitor_);
      const Unlocked unlocked(lock);
      copy();
    }
    for (Hold& hold : holds) --hold.run->filling;
  }
  for (Hold& hold : holds) {
    for (Frame* source : hold.sources) memory_.mark_used(*source);
    if (hold.is_new) hold.frame->ready = memory_.record();
  }
  monitor_.check_usable();
}

/// Moves all pages of the run to its new frame.
void WholePins::commit(Hold& hold) noexcept {
  if (!hold.is_new) return;
  Run& run = *hold.run;
  Frame& frame = *hold.frame;
  for (Page& page : run.pages) {
    if (page.frame == &frame) continue;
    if (!std::exchange(page.frame, &frame)) {
      const bool is_new_content = page.state == Residency::zero && !run.gathered();
      page.state =
          is_new_content ? Residency::dirty : Residency::clean;  // an evicted page is about to be overwritten
    }
  }
  for (Frame* source : hold.sources) {
    source->assembling = true;  // no page needs it any more
    frames_.drop_pin(*source);
  }
  hold.sources.clear();
  frame.assembling = false;
  run.assembled = nullptr;
  monitor_.changed().notify_all();
}

void WholePins::let_go(std::vector<Hold>& holds) noexcept {
  for (Hold& hold : holds) {
    for (Frame* source : hold.sources) frames_.drop_pin(*source);
    hold.sources.clear();
    if (!hold.frame) continue;
    if (std::exchange(hold.is_new, false)) hold.run->assembled = nullptr;  // the frame is `assembling`: it is dropped
    frames_.drop_pin(*std::exchange(hold.frame, nullptr));
  }
  monitor_.changed().notify_all();
}

void WholePins::unpin(std::span<const PinRequest> requests, const PinOptions& options, std::uint64_t thread,
                      bool failed) noexcept {
  if (monitor_.in_forked_child()) return;
  Lock lock(monitor_.mutex());
  if (options.lasting) frames_.end_lasting(requests.size(), thread);
  if (options.extra > 0) frames_.end_claim(options.extra, thread);
  for (const PinRequest& request : requests) {
    Segment& segment = *request.segment;
    if (--segment.pins_ == 0) segment.hide();
    Frame& frame = *segment.run_->whole_frame();
    try {
      memory_.mark_used(frame);
    } catch (...) {  // a device that cannot record an event has lost its results too
    }
    if (--frame.whole_pins == 0 && !frame.permanent) budgets_.let_go(frame.memory.bytes());
    if (request.access != Access::read) failed ? Frames::begin_to_revert(frame) : frame.promised.clear();
    frames_.drop_pin(frame, thread);
  }
  if (monitor_.closed()) return;
  room_.clean_behind(lock);
  if (!frames_.is_gathered()) ahead_.run(lock);
}

}  // namespace zeropage
