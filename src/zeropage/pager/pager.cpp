#include "zeropage/pager/pager.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "zeropage/base/errors.h"

namespace zeropage {

std::shared_ptr<Pager> Pager::make(const PagerOptions& options, std::unique_ptr<Io> io) {
  return std::shared_ptr<Pager>(new Pager(options, std::move(io)));
}

Pager::Pager(const PagerOptions& options, std::unique_ptr<Io> io)
    : generation_(process_generation()),
      page_bytes_(std::max(round_down(options.page_bytes, kBlockBytes), kBlockBytes)),
      device_("device_memory", options.device_bytes),
      host_("host_memory", options.host_bytes),
      io_(std::move(io)),
      policy_(make_least_recently_used()) {
  if (!options.disk_path.empty()) {
    if (!io_) io_ = make_io(options.io);
    swap_ = std::make_unique<SwapFile>(options.disk_path);
  }
  arena_ = std::make_unique<Arena>(options.device_bytes + options.host_bytes, [this](std::span<std::byte> slab) {
    if (io_) io_->register_memory(slab);
  });
}

Pager::~Pager() {
  if (generation_ != process_generation()) {
    // A forked child: the ring, its buffers and the disk are the parent's. Leave every copy as it is.
    for (auto& [_, run] : runs_) {
      for (Page& page : run->pages) page.transfer.abandon();
    }
    new auto(std::move(runs_));
    new auto(std::move(frames_));
    (void)io_.release(), (void)swap_.release(), (void)arena_.release();
    return;
  }
  close();
}

void Pager::close() {
  if (generation_ != process_generation()) return;
  std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  for (auto& [_, run] : runs_) {
    settle_for_death(*run);
    run->extent = {};
    for (Page& page : run->pages) page.frame = nullptr;
  }
  frames_.clear();
  swap_.reset();
  io_.reset();
  arena_.reset();
  for (auto& row : stats_.home_bytes) std::fill(std::begin(row), std::end(row), 0);
}

void Pager::check_usable() const {
  if (generation_ != process_generation()) {
    throw AccessError(
        "this tensor is paged by the parent process and cannot be used in a forked child; use the spawn "
        "start method, or pass the child a copy made with zeropage.pinned(tensor)");
  }
  if (closed_)
    throw AccessError("this tensor's space was closed and its data is gone; close a space after its last use");
}

void Pager::mark(Run& run, std::size_t page, Access access) {
  if (access == Access::read) return;
  Residency& state = run.pages[page].state;
  state = state == Residency::writing || state == Residency::rewritten ? Residency::rewritten : Residency::dirty;
}

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
      if (run.pages[i].state == Residency::reading) settle(run, i);
    }
  }
  for (const PinRequest& request : requests) {
    Segment& segment = *request.segment;
    Run& run = *segment.run_;
    Frame& frame = *run.whole_frame();
    if (!frame.permanent) {
      for (std::size_t i = 0; i < run.pages.size(); ++i) mark(run, i, request.access);
    }
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
    const bool read = request.access != Access::overwrite || run.slots;
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
        std::memcpy(into, address(*g.run, i), g.run->bytes_of(i));
        drop_frame(*alone);
      } else if (page.state == Residency::zero) {
        if (g.read) std::memset(into, 0, g.run->bytes_of(i));
        page.state = Residency::dirty;
      } else {
        page.state = Residency::clean;
      }
      page.frame = g.frame;
    }
    held.push_back(std::exchange(g.frame, nullptr));
  }
}

PagePin Pager::pin_page(Segment& segment, std::size_t index, Access access) {
  check_usable();
  std::lock_guard lock(mutex_);
  check_usable();
  Run& run = *segment.run_;
  Page& page = run.pages[index];
  if (access == Access::overwrite && run.slots) access = Access::write;  // neighbours share the page
  if (!page.frame) {
    ++stats_.faults;
    // The host pays for single pages; where it has nothing, the device does.
    const Pool pool = host_.limit() >= 4 * page_bytes_ ? Pool::host : Pool::device;
    Frame* frame = make_frame(run, index, 1, pool);
    if (page.state == Residency::home && access != Access::overwrite) {
      try {
        page.transfer = start_read(run, index, frame->memory.data());
      } catch (...) {
        drop_frame(*frame);
        throw;
      }
      page.state = Residency::reading;
    } else if (page.state == Residency::zero && access != Access::overwrite) {
      std::memset(frame->memory.data(), 0, frame->memory.bytes());
      page.state = Residency::dirty;
    } else {
      page.state = Residency::dirty;
    }
    page.frame = frame;
  } else {
    if (page.state == Residency::reading && access != Access::read) settle(run, index);
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

void Pager::prefetch_page(Segment& segment, std::size_t index) {
  std::lock_guard lock(mutex_);
  Run& run = *segment.run_;
  Page& page = run.pages[index];
  if (closed_ || host_.limit() < 4 * page_bytes_ || page.frame || page.state != Residency::home) return;
  const std::size_t bytes = round_up(run.bytes_of(index), kBlockBytes);
  while (host_.used() + bytes > host_.limit()) {
    Frame* victim = policy_->victim(Pool::host);
    if (!victim) return;
    for (std::size_t i = victim->first_page; i < victim->first_page + victim->pages; ++i) {
      const Page& cold = victim->run->pages[i];
      if (cold.state != Residency::clean && !(cold.state == Residency::writing && cold.transfer.done())) return;
    }
    evict_frame(*victim);
  }
  try {
    Frame* frame = make_frame(run, index, 1, Pool::host);
    page.frame = frame;
    try {
      page.transfer = start_read(run, index, frame->memory.data());
    } catch (...) {
      drop_frame(*frame);
      throw;
    }
    page.state = Residency::reading;
    drop_pin(*frame);
  } catch (const BudgetError&) {  // only a hint: whoever needs the page will say what is wrong
  }
}

PagePin::~PagePin() {
  if (!frame_) return;
  std::lock_guard lock(pager_->mutex_);
  if (pager_->closed_) return;
  pager_->drop_pin(*frame_);
  pager_->clean_coldest();
}

void PagePin::wait() {
  std::lock_guard lock(pager_->mutex_);
  if (page_->state != Residency::reading) return;
  Run& run = *frame_->run;
  const std::size_t index = page_ - run.pages.data();
  pager_->settle(run, index);
  if (write_) pager_->mark(run, index, Access::write);
}

void Pager::zero(Segment& segment) {
  check_usable();
  Run& run = *segment.run_;
  if (run.slots || run.tier != Tier::disk) {
    for (std::size_t i = 0; i < run.pages.size(); ++i) {
      PagePin pin = pin_page(segment, i, Access::overwrite);
      pin.wait();
      std::memset(pin.data(), 0, segment.bytes_of(i));
    }
    return;
  }
  std::lock_guard lock(mutex_);
  const auto pinned = [](const Page& page) { return page.frame && page.frame->pins > 0; };
  for (Page& page : run.pages) {
    // A transfer must end before its memory is given up; what it brought is of no interest.
    if (!pinned(page)) Ticket ended = std::exchange(page.transfer, {});
  }
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    Page& page = run.pages[i];
    if (pinned(page)) {
      std::memset(address(run, i), 0, run.bytes_of(i));
      mark(run, i, Access::overwrite);
    } else {
      page.state = Residency::zero;
      if (page.frame) drop_frame(*page.frame);
    }
  }
}

void Pager::evict(Segment& segment) {
  check_usable();
  std::lock_guard lock(mutex_);
  if (segment.run_->tier != Tier::disk) return;
  for (Page& page : segment.run_->pages) {
    if (page.frame && page.frame->pins == 0) evict_frame(*page.frame);
  }
}

bool Pager::resident(const Segment& segment) const {
  std::lock_guard lock(mutex_);
  if (closed_ || !segment.run_) return false;
  return std::any_of(segment.run_->pages.begin(), segment.run_->pages.end(), [](const Page& p) { return p.frame; });
}

void Pager::wait() {
  check_usable();
  std::lock_guard lock(mutex_);
  std::exception_ptr error;
  for (auto& [_, run] : runs_) {
    try {
      settle_all(*run, 0, run->pages.size());
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

PagerStats Pager::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace zeropage
