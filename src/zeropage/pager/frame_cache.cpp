#include "zeropage/pager/frame_cache.h"

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/pager/homes/lower_cache_home.h"
#include "zeropage/pager/homes/sharded_home.h"

namespace zeropage {
namespace {

Arena::SlabHook register_slab(const CacheOptions& options, std::vector<std::shared_ptr<void>>& registered) {
  if (!options.register_memory) return nullptr;
  return [&registered, register_memory = options.register_memory](std::span<std::byte> slab) {
    registered.push_back(register_memory(slab));
  };
}

/// The host's cache under a device's: [Note: two memories].
std::shared_ptr<FrameCache> make_host(const CacheOptions& options, std::unique_ptr<Io> io,
                                      std::shared_ptr<SwapFile> swap) {
  CacheOptions host = options;
  host.device = nullptr;
  host.device_bytes = 0;
  host.register_memory = nullptr;
  if (options.device->registers_host()) {
    host.register_memory = [memory = options.device](std::span<std::byte> slab) {
      return memory->register_host(slab);
    };
  }
  return FrameCache::make(host, std::move(io), std::move(swap));
}

}  // namespace

std::shared_ptr<FrameCache> FrameCache::make(const CacheOptions& options, std::unique_ptr<Io> io,
                                             std::shared_ptr<SwapFile> swap) {
  return std::shared_ptr<FrameCache>(new FrameCache(options, std::move(io), std::move(swap)));
}

std::shared_ptr<FrameCache> FrameCache::make_gathered(std::shared_ptr<FrameCache> local, std::shared_ptr<Ranks> ranks,
                                                      std::size_t bytes, std::shared_ptr<DeviceMemory> device,
                                                      std::optional<Tier> secondary) {
  return std::shared_ptr<FrameCache>(
      new FrameCache(std::move(local), std::move(ranks), bytes, std::move(device), secondary));
}

FrameCache::FrameCache(const CacheOptions& options, std::unique_ptr<Io> io, std::shared_ptr<SwapFile> swap)
    : page_bytes_(std::max(round_down(options.page_bytes, kBlockBytes), kBlockBytes)),
      longest_wait_(options.memory_timeout),
      memory_(options.device_bytes + (options.device ? 0 : options.host_bytes), options.device,
              register_slab(options, registered_), options.hollow),
      budgets_(memory_, options.device_bytes, options.device ? 0 : options.host_bytes, /*gathered=*/false),
      lower_(options.device ? make_host(options, std::move(io), std::move(swap)) : nullptr),
      io_(lower_ || options.disk_path.empty() ? nullptr
          : io                                ? std::move(io)
                                              : make_io(options.io)),
      swap_(!io_             ? nullptr
            : swap           ? std::move(swap)
            : options.hollow ? SwapFile::make_hollow(options.hollow->disk_bytes)
                             : SwapFile::make(options.disk_path, *io_)),
      home_(lower_ ? std::make_unique<LowerCacheHome>(monitor_, *lower_, *options.device)
            : io_  ? make_disk_home(*io_, *swap_)
                   : nullptr) {
  if (!lower_) return;
  monitor_.set_source(Spent::upload);
  lower_->upper_.serve();
  lower_->upper_.connect([this] { read_ahead(); },
                         [this] { return home_->tidy(/*wait=*/true) || lower_pins_.tidy(/*wait=*/true); });
}

FrameCache::FrameCache(std::shared_ptr<FrameCache> local, std::shared_ptr<Ranks> ranks, std::size_t bytes,
                       std::shared_ptr<DeviceMemory> device, std::optional<Tier> secondary)
    : page_bytes_(local->page_bytes_),
      longest_wait_(local->longest_wait_),
      memory_(bytes, device, {}, local->memory_.hollow()),
      budgets_(memory_, bytes, 0, /*gathered=*/true),
      lower_(std::move(local)),
      ranks_(std::move(ranks)),
      secondary_(ranks_->node_size() < ranks_->size() ? secondary : std::nullopt),
      home_(std::make_unique<ShardedHome>(monitor_, *lower_, ranks_, memory_)) {
  monitor_.set_source(Spent::gather);
  lower_->upper_.serve();
}

/// Starts the next transfers, here and in the cache above. Runs on the thread on which a transfer ended.
void FrameCache::go_on(Lock& lock) {
  if (!ranks_) ahead_.run(lock);
  lock.unlock();
  upper_.progress();
}

void FrameCache::read_ahead() {
  monitor_.run_at_end([this](Lock& lock) {
    if (!ranks_) ahead_.run(lock);
  });
}

FrameCache::~FrameCache() {
  if (monitor_.in_forked_child()) {
    // In a forked child the ring, its buffers and the disk are the parent's. Leave every copy as it is.
    runs_.abandon();
    lower_pins_.abandon();
    memory_.abandon();
    new auto(std::move(registered_));
    (void)home_.release(), (void)io_.release();
    new auto(std::move(swap_));
    return;
  }
  close();
}

void FrameCache::close() {
  if (monitor_.in_forked_child()) return;
  {
    Lock lock(monitor_.mutex());
    if (monitor_.closed()) return;
    monitor_.close();
  }
  if (lower_) lower_->upper_.disconnect();
  transfers_.finish();
  lower_pins_.close();
  if (io_) io_->wait_all();
  {
    Lock lock(monitor_.mutex());
    drained_ = true;
    finish_close();
  }
  if (lower_ && !ranks_) lower_->close();
}

/// After close(): releases what no operator holds, and everything once the last pin is dropped.
void FrameCache::finish_close() noexcept {
  if (!drained_) return;
  frames_.drop_unused();
  runs_.forget_home_bytes();
  if (frames_.pins() > 0 || monitor_.inside() > 0) return;
  runs_.give_back_homes();
  snapshots_.close();
  home_.reset();
  swap_.reset();
  registered_.clear();
  memory_.close();
}

void FrameCache::attach(Segment& segment, Run& run, std::size_t offset, std::size_t bytes) {
  ++run.tensors;
  segment.cache_ = shared_from_this();
  segment.run_ = &run;
  segment.offset_ = offset;
  segment.bytes_ = bytes;
}

void FrameCache::bind(Segment& segment, const SegmentSpec& spec) {
  while (true) {
    try {
      return bind_once(segment, spec);
    } catch (const BudgetError&) {
      if (!lower_pins_.tidy(/*wait=*/true)) throw;  // staged pages take room below for a moment
    }
  }
}

void FrameCache::bind_once(Segment& segment, const SegmentSpec& spec) {
  check_usable();
  bool used_before = false;
  {
    Lock lock(monitor_.mutex());
    check_usable();
    std::size_t offset = 0;
    Run& run = home_allocator_.run_for(lock, spec, offset);
    attach(segment, run, offset, spec.bytes);
    if (!run.slots) run.only = &segment;
    used_before = run.slots && run.pages[0].state != Residency::zero;
  }
  if (!used_before) return;
  try {
    zero(segment);  // a slot of a shared page may hold a dead tensor's bytes
  } catch (...) {
    release(segment);
    throw;
  }
}

void FrameCache::bind_gathered(Segment& segment, const GatheredSpec& spec) {
  check_usable();
  Lock lock(monitor_.mutex());
  check_usable();
  std::size_t offset = 0;
  Run& run = home_allocator_.gathered_run_for(segment, spec, offset);
  attach(segment, run, offset, spec.bytes);
  run.program_writes += segment.program_writes();  // of a tensor whose home is found late
}

void FrameCache::release(Segment& segment) noexcept {
  // A forked child has copies of its parent's segments: it must not release them.
  if (monitor_.in_forked_child()) return;
  Lock lock(monitor_.mutex());
  if (!segment.run_) return;
  Run& run = *std::exchange(segment.run_, nullptr);
  if (run.only == &segment) run.only = nullptr;
  for (std::size_t i = 0; i < run.shares.size(); ++i) {
    if (run.shares[i].offset != segment.offset_) continue;
    run.shares[i].segment = run.shares[i].whole = nullptr;
    // The caller destroys the share next. By index: another thread may add a tensor to the run.
    monitor_.changed().wait(lock, [&] { return run.shares[i].users == 0; });
  }
  if (monitor_.closed()) return;
  if (run.stream_lasts) ahead_.close_stream(run);
  home_allocator_.release(run, segment.offset_, segment.bytes_);
}

void FrameCache::set_coding(Segment& segment, Coding coding) {
  const Lock lock(monitor_.mutex());
  if (!segment.run_ || segment.run_->packed()) return;
  segment.run_->coding = segment.run_->usual_coding = coding;
}

bool FrameCache::is_coded(const Segment& segment) const {
  const Lock lock(monitor_.mutex());
  return segment.run_ && segment.run_->coding != Coding::none;
}

void FrameCache::expect_change(Segment& segment) {
  Lock lock(monitor_.mutex());
  if (!segment.run_) return;
  segment.run_->expects_change = true;
  // Here too: the update may have come early on this rank alone. If the tensor then dies, no share_changes() follows.
  segment.run_->outdate_secondary();
  segment.run_->coding = segment.run_->usual_coding;
  room_.give_up_frames(lock, *segment.run_);
}

void FrameCache::take_changes(std::span<const PinRequest> requests, const std::function<void(Segment&)>& visit) {
  const Lock lock(monitor_.mutex());
  if (frames_.is_of_one_rank(requests)) return;
  for (Run* run : ahead_.changes()) {
    run->expects_change = false;
    for (const Share& share : run->shares) {
      if (share.whole) visit(*share.whole);
    }
  }
}

bool FrameCache::has_room(Tier tier, std::size_t bytes) const {
  if (has_separate_memory() && tier != Tier::device) return lower_->has_room(tier, bytes);
  const Lock lock = monitor_.look();
  if (tier == Tier::disk) return swap_ != nullptr;
  // At most half of a budget: operators and rules need frames in addition to the homes.
  return budgets_.homes_in(tier) + bytes <=
         (tier == Tier::device ? budgets_.device_limit() : budgets_.host_limit()) / 2;
}

FrozenSegment FrameCache::freeze(Segment& segment) {
  check_usable();
  Lock lock(monitor_.mutex());
  check_usable();
  Run& run = *segment.run();
  // Operators that hold it may have asked the device for changes, which belong to its content.
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    Frame* const frame = run.pages[i].frame;
    const bool is_in_use = frame && frame->pins > 0 && !Frames::is_reading(*frame);
    if (is_in_use && (i == 0 || frame != run.pages[i - 1].frame)) memory_.mark_used(*frame);
  }
  if (!run.below) {
    lock.unlock();
    return snapshots_.freeze(shared_from_this(), segment);
  }
  snapshots_.write_home(lock, run);
  check_usable();
  const Inside inside(monitor_);
  const Unlocked unlocked(lock);
  run.home->forget(run);  // drops pages that are ready there for transfers
  run.home->tidy(/*wait=*/false);
  return lower_->freeze(*run.below);
}

MemoryClaim FrameCache::claim(std::span<const PinRequest> requests) {
  check_usable();
  Lock lock(monitor_.mutex());
  check_usable();
  Grants::Claim claim = page_pins_.claim(lock, requests);
  MemoryClaim kept;
  kept.cache_ = shared_from_this();
  kept.bytes_ = claim.bytes();
  kept.thread_ = this_thread_number();
  claim.leave();
  return kept;
}

MemoryClaim::~MemoryClaim() {
  if (!cache_ || cache_->monitor_.in_forked_child()) return;
  const Monitor::Lock lock(cache_->monitor_.mutex());
  cache_->frames_.end_claim(bytes_, thread_);
}

std::uint64_t FrameCache::changes(const Segment& segment) const {
  const Lock lock = monitor_.look();
  return segment.run_ ? segment.run_->changes : 0;
}

bool FrameCache::resident(const Segment& segment) const {
  const Lock lock = monitor_.look();
  if (monitor_.closed() || !segment.run_) return false;
  return std::any_of(segment.run_->pages.begin(), segment.run_->pages.end(), [](const Page& p) { return p.frame; });
}

bool FrameCache::has_version(const Segment& segment) const {
  const Lock lock(monitor_.mutex());
  return !monitor_.closed() && segment.run_ && segment.run_->has_version;
}

bool FrameCache::is_unused(const Segment& segment) const {
  const Lock lock(monitor_.mutex());
  if (monitor_.closed() || !segment.run_) return false;
  const auto is_quiet = [](const Page& page) {
    const Frame* const frame = page.frame;
    if (frame && (frame->pins > 0 || frame->transfers > 0 || frame->claimer != std::thread::id())) return false;
    return page.state == Residency::evicted || page.state == Residency::clean;
  };
  return std::ranges::all_of(segment.run_->pages, is_quiet);
}

void FrameCache::wait() {
  check_usable();
  Lock lock(monitor_.mutex());
  check_usable();
  if (ranks_) return;
  const auto is_quiet = [&] { return transfers_.reading_bytes() == 0 && transfers_.writing_bytes() == 0; };
  transfers_.wait_until(lock, is_quiet, Cause::content);
  transfers_.throw_failed_write();
  lock.unlock();
  if (lower_) lower_->wait();
}

/// Lets dead segments go once their transfers have ended.
void FrameCache::tidy() const {
  if (monitor_.in_forked_child()) return;
  Lock lock(monitor_.mutex());
  if (monitor_.closed()) return;
  const Inside inside(monitor_);
  const Unlocked unlocked(lock);
  home_->tidy(/*wait=*/false);
}

CacheStats FrameCache::stats() const {
  const bool separate = lower_ && !ranks_;
  if (separate) tidy();
  CacheStats sum = separate ? lower_->stats() : CacheStats{};
  const Lock lock = monitor_.look();
  for (int role = 0; role < kRoles; ++role) {
    for (int tier = 0; tier < kTiers; ++tier) {
      sum.home_bytes[role][tier] += runs_.home_bytes(role, tier);
      sum.home_peak[role][tier] += runs_.home_peak(role, tier);
    }
  }
  if (!separate)
    sum.read_bytes = transfers_.read_bytes() + home_reads_.bytes(), sum.written_bytes = transfers_.written_bytes();
  if (!lower_) sum.disk_seconds = transfers_.busy_seconds();
  if (separate) sum.uploaded_bytes = transfers_.read_bytes(), sum.downloaded_bytes = transfers_.written_bytes();
  // Only this cache's faults: those of the host below follow from them.
  sum.faults = whole_pins_.faults() + page_pins_.faults();
  sum.evictions += frames_.evictions();
  sum.surprises = timeline_.plan().surprises();
  sum.source_bytes += runs_.source_bytes();
  const BookedTime::Seconds spent = monitor_.booked().seconds();
  for (int i = 0; i < kSpent; ++i) sum.spent[i] += spent[i];
  return sum;
}

bool FrameCache::expects_use(const Segment& segment) const {
  const Lock lock = monitor_.look();
  const Run* const run = monitor_.closed() ? nullptr : segment.run();
  return run && timeline_.plan().next_use(run->ordinal).begin != AccessPlan::kNever;
}

bool FrameCache::holds_everything() const {
  check_usable();
  const Lock lock = monitor_.look();
  return runs_.pageable_peak() + budgets_.homes_in(Tier::device) <= memory_.budget().limit();
}

FrameCache::Usage FrameCache::usage(Pool pool) const {
  if (pool == Pool::host && lower_ && !ranks_) return lower_->usage(pool);
  const Lock lock = monitor_.look();
  return budgets_.usage(pool);
}

std::string_view FrameCache::io_name() const { return lower_ ? lower_->io_name() : io_ ? io_->name() : "none"; }

std::size_t FrameCache::swap_bytes() const {
  if (lower_) return lower_->swap_bytes();
  const Lock lock = monitor_.look();
  return swap_ ? swap_->size() : 0;
}

}  // namespace zeropage
