#include "zeropage/pager/pager.h"

#include <fmt/format.h>

#include <algorithm>

#include "zeropage/base/errors.h"

namespace zeropage {

std::shared_ptr<Pager> Pager::make(const PagerOptions& options, std::unique_ptr<Io> io) {
  return std::shared_ptr<Pager>(new Pager(options, std::move(io)));
}

Pager::Pager(const PagerOptions& options, std::unique_ptr<Io> io)
    : generation_(process_generation()),
      page_bytes_(std::max(round_down(options.page_bytes, kBlockBytes), kBlockBytes)),
      device_("device_memory", options.device_bytes),
      host_("host_memory", options.device ? 0 : options.host_bytes),
      policy_(make_least_recently_used()) {
  if (options.device) {
    open_below(options, std::move(io));
    return;
  }
  if (!options.disk_path.empty()) {
    io_ = io ? std::move(io) : make_io(options.io);
    swap_ = std::make_unique<SwapFile>(options.disk_path);
  }
  const auto on_first_use = [this, register_memory = options.register_memory](std::span<std::byte> slab) {
    if (io_) io_->register_memory(slab);
    if (register_memory) registered_.push_back(register_memory(slab));
  };
  arena_ = std::make_unique<Arena>(options.device_bytes + options.host_bytes, on_first_use);
}

/// [Note: two memories]
void Pager::open_below(const PagerOptions& options, std::unique_ptr<Io> io) {
  memory_ = options.device;
  PagerOptions host = options;
  host.device = nullptr;
  host.device_bytes = 0;
  host.register_memory = [memory = memory_](std::span<std::byte> slab) { return memory->register_host(slab); };
  below_ = make(host, std::move(io));
  uploads_ = std::make_unique<Uploads>(*below_, *memory_);
  arena_ = std::make_unique<Arena>(memory_->region());
}

Pager::~Pager() {
  if (generation_ != process_generation()) {
    // A forked child: the ring, its buffers and the disk are the parent's. Leave every copy as it is.
    for (auto& [_, run] : runs_) {
      for (Page& page : run->pages) page.transfer.abandon();
    }
    new auto(std::move(runs_));
    new auto(std::move(frames_));
    new auto(std::move(memory_));
    new auto(std::move(registered_));
    (void)io_.release(), (void)swap_.release(), (void)uploads_.release(), (void)gathers_.release();
    (void)arena_.release();
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
    if (run->below) uploads_->finish(*run->below);
    run->below.reset();
    for (Page& page : run->pages) page.frame = nullptr;
  }
  frames_.clear();
  uploads_.reset();
  gathers_.reset();
  swap_.reset();
  io_.reset();
  registered_.clear();
  arena_.reset();
  if (below_) below_->close();
  memory_.reset();
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

void Pager::zero(Segment& segment) {
  check_usable();
  Run& run = *segment.run_;
  if (run.slots || run.gathered() || !run.has_home_elsewhere()) {
    for (std::size_t i = 0; i < run.pages.size(); ++i) {
      PagePin pin = pin_page(segment, i, Access::overwrite);
      pin.wait();
      clear(pin.data(), segment.bytes_of(i));
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
      order_after(*page.frame);
      clear(address(run, i), run.bytes_of(i));
      mark(run, i, Access::overwrite);
    } else {
      page.state = Residency::zero;
      if (page.frame) drop_frame(*page.frame);
    }
  }
  if (run.below) below_->zero(*run.below);
}

void Pager::evict(Segment& segment) {
  check_usable();
  std::lock_guard lock(mutex_);
  Run& run = *segment.run_;
  if (!run.has_home_elsewhere()) return;
  for (Page& page : run.pages) {
    if (page.frame && page.frame->pins == 0) evict_frame(*page.frame);
  }
  if (run.below) below_->evict(*run.below);
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
  if (below_) below_->wait();
}

PagerStats Pager::stats() const {
  PagerStats sum = below_ ? below_->stats() : PagerStats{};
  std::lock_guard lock(mutex_);
  for (int role = 0; role < kRoles; ++role) {
    for (int tier = 0; tier < kTiers; ++tier) {
      sum.home_bytes[role][tier] += stats_.home_bytes[role][tier];
      sum.home_peak[role][tier] += stats_.home_peak[role][tier];
    }
  }
  if (!below_) sum.read_bytes = stats_.read_bytes, sum.written_bytes = stats_.written_bytes;
  if (below_) sum.uploaded_bytes = stats_.read_bytes, sum.downloaded_bytes = stats_.written_bytes;
  sum.faults = stats_.faults;  // of operators: the pages of the host that they met are behind them
  sum.evictions += stats_.evictions;
  sum.waited_seconds += below_ ? 0 : stats_.waited_seconds;
  return sum;
}

}  // namespace zeropage
