// Pins of whole segments: what every operator on the general path does first and last.
#include <fmt/format.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/pager/pager.h"

namespace zeropage {

void Pager::mark(Run& run, std::size_t page, Access access) {
  if (access == Access::read) return;
  Residency& state = run.pages[page].state;
  state = state == Residency::writing || state == Residency::rewritten ? Residency::rewritten : Residency::dirty;
}

/// Of a page that nobody wrote: its home, if it has one of its own, has yet to be told.
Residency Pager::newborn_state(const Run& run) { return run.gathered() ? Residency::clean : Residency::dirty; }

void Pager::drop_pin(Frame& frame) noexcept {
  if (--frame.pins > 0) return;
  if (frame.run->pages[frame.first_page].frame != &frame) {
    drop_frame(frame);  // its read failed while it was pinned
  } else if (!frame.permanent) {
    policy_->use(frame);
  }
  unpinned_.notify_all();
}

bool Pager::has_pinned_part(const PinRequest& request) {
  const Run& run = *request.segment->run_;
  if (run.whole_frame()) return false;
  return std::any_of(run.pages.begin(), run.pages.end(), [](const Page& p) { return p.frame && p.frame->pins > 0; });
}

void Pager::pin(std::span<const PinRequest> requests) {
  check_usable();
  std::unique_lock lock(mutex_);
  check_usable();
  bool resident = true;
  for (const PinRequest& request : requests) {
    Frame* frame = request.segment->run_->whole_frame();
    resident = resident && frame && (frame->pool == Pool::device || frame->permanent);
  }
  if (!resident) {
    // Another thread's rule may hold single pages of a run that is to become whole.
    unpinned_.wait(lock, [&] { return std::none_of(requests.begin(), requests.end(), has_pinned_part); });
    check_usable();  // it may have been closed meanwhile
    try {
      gather(requests, /*from_empty=*/false);
    } catch (const BudgetError&) {
      // What this operator needs may lie between what it already has. Move everything out and lay it down afresh.
      gather(requests, /*from_empty=*/true);
    }
  }
  for (const PinRequest& request : requests) {
    Segment& segment = *request.segment;
    Run& run = *segment.run_;
    for (std::size_t i = 0; i < run.pages.size(); ++i) {
      if (run.pages[i].state != Residency::reading) continue;
      settle(run, i);
      mark_ready(*run.whole_frame());
    }
  }
  for (const PinRequest& request : requests) {
    Segment& segment = *request.segment;
    Run& run = *segment.run_;
    Frame& frame = *run.whole_frame();
    if (!frame.permanent) {
      for (std::size_t i = 0; i < run.pages.size(); ++i) mark(run, i, request.access);
    }
    order_after(frame);
    ++frame.pins;
    if (segment.pins_++ == 0) segment.expose(frame.memory.data() + segment.offset_);
  }
}

void Pager::unpin(std::span<const PinRequest> requests) noexcept {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  for (const PinRequest& request : requests) {
    Segment& segment = *request.segment;
    if (--segment.pins_ == 0) segment.hide();
    mark_used(*segment.run_->whole_frame());
    drop_pin(*segment.run_->whole_frame());
  }
}

/// A run on its way into one frame.
struct Pager::Gathering {
  Run* run;
  bool read;  // false: the operator overwrites all of it
  Frame* frame = nullptr;
  std::vector<Ticket> reads = {};
};

/// Makes every request's run whole, in a frame that the device's budget pays for. On failure nothing has changed but
/// that other frames may have left.
void Pager::gather(std::span<const PinRequest> requests, bool from_empty) {
  std::vector<Gathering> missing;
  std::vector<Frame*> held;
  std::size_t needed = 0;
  struct Undo {
    Pager& pager;
    std::vector<Gathering>& missing;
    std::vector<Frame*>& held;
    ~Undo() {
      for (Gathering& g : missing) {
        g.reads.clear();
        if (g.frame) pager.drop_frame(*g.frame);
      }
      for (Frame* frame : held) pager.drop_pin(*frame);
    }
  } undo{*this, missing, held};

  for (const PinRequest& request : requests) {
    Run& run = *request.segment->run_;
    const bool read = request.access != Access::overwrite || run.shares_page();
    auto known = std::find_if(missing.begin(), missing.end(), [&](const Gathering& g) { return g.run == &run; });
    if (known != missing.end()) {
      known->read |= read;
      continue;
    }
    if (from_empty) {
      // Frames that an outer operator holds stay where they are.
      for (std::size_t i = 0; i < run.pages.size(); ++i) {
        Frame* frame = run.pages[i].frame;
        if (frame && frame->pins == 0 && !frame->permanent) evict_frame(*frame);
      }
    }
    if (Frame* frame = run.whole_frame()) {
      ++frame->pins;
      held.push_back(frame);
    } else {
      missing.push_back({&run, read});
      needed += round_up(run.bytes, kBlockBytes);
    }
  }
  if (needed > device_.limit()) {
    throw BudgetError(fmt::format("device_memory = {} cannot hold the {} that it needs at once; raise device_memory",
                                  format_bytes(device_.limit()), format_bytes(needed)));
  }
  for (Frame* frame : held) {
    if (frame->pool == Pool::host && !frame->permanent) {
      move_to_pool(*frame, reserve(Pool::device, frame->charge.bytes()), Pool::device);
    }
  }
  if (from_empty) {
    std::sort(missing.begin(), missing.end(), [](auto& a, auto& b) { return a.run->bytes > b.run->bytes; });
    while (make_room(Pool::device)) {
    }
    while (make_room(Pool::host)) {
    }
  }
  for (Gathering& g : missing) {
    g.frame = make_frame(*g.run, 0, g.run->pages.size(), Pool::device);
    ++stats_.faults;
  }
  // From here on nothing leaves, so what is where stays so.
  for (Gathering& g : missing) {
    for (std::size_t i = 0; i < g.run->pages.size(); ++i) {
      if (g.run->pages[i].state == Residency::home && g.read) {
        g.reads.push_back(start_read(*g.run, i, g.frame->memory.data() + i * g.run->page_bytes));
      }
    }
  }
  for (Gathering& g : missing) {
    for (Ticket& read : g.reads) wait_for(read);
    settle_all(*g.run, 0, g.run->pages.size());
  }
  for (Gathering& g : missing) {
    for (std::size_t i = 0; i < g.run->pages.size(); ++i) {
      Page& page = g.run->pages[i];
      std::byte* into = g.frame->memory.data() + i * g.run->page_bytes;
      if (Frame* alone = page.frame) {
        order_after(*alone);
        copy(into, address(*g.run, i), g.run->bytes_of(i));
        mark_used(*alone);
        drop_frame(*alone);
      } else if (page.state == Residency::zero) {
        if (g.read) clear(into, g.run->bytes_of(i));
        page.state = newborn_state(*g.run);
      } else {
        page.state = Residency::clean;
      }
      page.frame = g.frame;
    }
    mark_ready(*g.frame);
    held.push_back(std::exchange(g.frame, nullptr));
  }
}

}  // namespace zeropage
