// Creation and death: which run a segment lies in, and where that run is at home.
#include <fmt/format.h>

#include <numeric>

#include "zeropage/base/errors.h"
#include "zeropage/pager/frame_cache.h"

namespace zeropage {
namespace {

constexpr std::size_t kSlotBytes = 64;  // what ATen aligns its own storages to

/// The page size for a tensor whose rows have row_bytes: a multiple of both row and block where there is one.
std::size_t cut_on_rows(std::size_t page_bytes, std::size_t row_bytes) {
  if (row_bytes == 0 || row_bytes > page_bytes) return page_bytes;
  const std::size_t unit = std::lcm(row_bytes, kBlockBytes);
  return unit > page_bytes ? page_bytes : round_down(page_bytes, unit);
}

/// A home in the host's cache, as the cache above it holds it.
class LowerSegment final : public Segment {
 public:
  ~LowerSegment() override {
    if (cache()) cache()->release(*this);
  }

 protected:
  void expose(std::byte*) override {}
  void hide() override {}
};

}  // namespace

void FrameCache::attach(Segment& segment, Run& run, std::size_t offset, std::size_t bytes) {
  ++run.tensors;
  segment.cache_ = shared_from_this();
  segment.run_ = &run;
  segment.offset_ = offset;
  segment.bytes_ = bytes;
}

void FrameCache::bind(Segment& segment, const SegmentSpec& spec) {
  check_usable();
  bool used_before = false;
  {
    Lock lock(monitor_.mutex());
    check_usable();
    std::size_t offset = 0;
    Run& run = run_for(lock, spec, offset);
    attach(segment, run, offset, spec.bytes);
    used_before = run.slots && run.pages[0].state != Residency::zero;
  }
  if (!used_before) return;
  try {
    zero(segment);  // a slot of a shared page may hold what a dead tensor left
  } catch (...) {
    release(segment);
    throw;
  }
}

Run& FrameCache::run_for(Lock& lock, const SegmentSpec& spec, std::size_t& offset) {
  const std::size_t shared_bytes = std::max(page_bytes_ / 4, kBlockBytes);
  if (spec.bytes > shared_bytes / 4) {
    return new_run(lock, spec, spec.bytes,
                   spec.page_bytes ? spec.page_bytes : cut_on_rows(page_bytes_, spec.row_bytes));
  }
  const std::size_t slot = round_up(std::max<std::size_t>(spec.bytes, 1), kSlotBytes);
  std::vector<Run*>& with_room = shared_[{spec.role, spec.tier}];
  while (!with_room.empty()) {
    Run& run = *with_room.back();
    if (auto at = run.slots->take(slot)) {
      offset = *at;
      return run;
    }
    run.listed = false;  // until one of its tensors dies
    with_room.pop_back();
  }
  Run& run = new_run(lock, spec, shared_bytes, shared_bytes);
  run.slots.emplace();
  run.slots->release(0, shared_bytes);
  offset = *run.slots->take(slot);
  list_room(run);
  return run;
}

void FrameCache::list_room(Run& run) {
  if (std::exchange(run.listed, true)) return;
  shared_[{run.role, run.tier}].push_back(&run);
}

Run& FrameCache::new_run(Lock& lock, const SegmentSpec& spec, std::size_t bytes, std::size_t page_bytes) {
  auto owned = std::make_unique<Run>();
  Run& run = *owned;
  run.role = spec.role;
  run.tier = spec.tier;
  run.bytes = std::max<std::size_t>(bytes, 1);
  run.page_bytes = page_bytes;
  run.pages = std::vector<Page>(ceil_div(run.bytes, run.page_bytes));
  if (has_separate_memory() && spec.tier != Tier::device) {
    // Not under this cache's lock: it may wait below for transfers whose ends come here.
    run.below = std::make_unique<LowerSegment>();
    {
      const Unlocked unlocked(lock);
      lower_->bind(*run.below, {run.bytes, spec.row_bytes, spec.role, spec.tier, page_bytes});
    }
    check_usable();
    run.home = home_.get();
  } else if (spec.tier == Tier::disk) {
    if (!swap_)
      throw SettingError("a role is set to \"disk\" but disk_path is not set; set disk_path to a directory");
    run.extent = swap_->allocate(run.bytes);
    run.home = home_.get();
  } else {
    make_permanent(lock, run);
  }
  runs_.add(std::move(owned));
  return run;
}

/// The run's frame is its home.
void FrameCache::make_permanent(Lock& lock, Run& run) {
  const bool on_device = run.tier == Tier::device;
  const std::size_t limit = on_device ? budgets_.device_limit() : budgets_.host_limit();
  const std::size_t used = budgets_.homes_in(run.tier) + (on_device ? budgets_.held_bytes() : 0),
                    bytes = round_up(run.bytes, kBlockBytes);
  const auto refuse_home = [&] {
    throw BudgetError(fmt::format("{} = {} cannot hold {} more: {} of it are homes or in use at once; raise {}",
                                  on_device ? "device_memory" : "host_memory", format_bytes(limit),
                                  format_bytes(bytes), format_bytes(used),
                                  on_device ? "device_memory" : "host_memory"));
  };
  if (used + bytes > limit) refuse_home();
  try {
    Frame& frame = room_.make_frame(lock, run, 0, run.pages.size(), /*permanent=*/true);
    if (budgets_.homes_in(run.tier) + (on_device ? budgets_.held_bytes() : 0) + bytes >
        limit) {  // another thread was quicker
      frame.permanent = false;
      frame.assembling = true;
      frames_.drop_pin(frame);
      refuse_home();
    }
    memory_.clear(frame.memory.data(), frame.memory.bytes());
    if (memory_.device()) frame.ready = memory_.device()->record();
    for (Page& page : run.pages) page.frame = &frame, page.state = Residency::dirty;
    frames_.drop_pin(frame);
  } catch (const Shortage&) {
    refuse_home();
  }
}

bool FrameCache::has_room(Tier tier, std::size_t bytes) const {
  if (has_separate_memory() && tier != Tier::device) return lower_->has_room(tier, bytes);
  Lock lock(monitor_.mutex());
  if (tier == Tier::disk) return swap_ != nullptr;
  // Half of a budget at most: operators and rules need frames beside the homes.
  return budgets_.homes_in(tier) + bytes <=
         (tier == Tier::device ? budgets_.device_limit() : budgets_.host_limit()) / 2;
}

void FrameCache::release(Segment& segment) noexcept {
  // A forked child has copies of segments that belong to its parent: nothing here is its to give back.
  if (monitor_.in_forked_child()) return;
  Lock lock(monitor_.mutex());
  if (!segment.run_) return;
  Run& run = *std::exchange(segment.run_, nullptr);
  if (run.whole == &segment) run.whole = nullptr;
  for (std::size_t i = 0; i < run.shares.size(); ++i) {
    if (run.shares[i].offset != segment.offset_) continue;
    run.shares[i].segment = nullptr;
    // The caller destroys the share next. By index: another thread may add a tensor to the run.
    monitor_.changed().wait(lock, [&] { return run.shares[i].users == 0; });
  }
  if (monitor_.closed()) return;
  if (run.slots) {
    run.slots->release(segment.offset_, round_up(std::max<std::size_t>(segment.bytes_, 1), kSlotBytes));
    list_room(run);
  }
  if (--run.tensors == 0) let_die(run);
}

void FrameCache::let_die(Run& run) {
  if (run.listed) std::erase(shared_[{run.role, run.tier}], &run);
  runs_.let_die(run);
}

void FrameCache::bind_gathered(Segment& segment, const GatheredSpec& spec) {
  check_usable();
  Lock lock(monitor_.mutex());
  check_usable();
  std::size_t offset = 0;
  Run& run = gathered_run_for(segment, spec, offset);
  attach(segment, run, offset, spec.bytes);
}

/// Small tensors take their places in a page one after another, and no place is taken twice: which is whose follows
/// from creations alone, not from deaths.
Run& FrameCache::gathered_run_for(Segment& segment, const GatheredSpec& spec, std::size_t& offset) {
  const std::size_t shared_bytes = round_up(std::max(page_bytes_ / 4, kBlockBytes), kBlockBytes);
  if (spec.alone || spec.padded_bytes > shared_bytes / 4) {
    Run& run = new_gathered_run(spec, spec.padded_bytes, spec.page_bytes, /*packed=*/false);
    run.shares.push_back({spec.share, 0, 0});
    run.whole = &segment;
    return run;
  }
  Run*& open = open_[spec.role];
  if (open && open->packed_bytes + spec.padded_bytes > open->bytes) {
    Run& full = *std::exchange(open, nullptr);
    if (--full.tensors == 0) let_die(full);
  }
  if (!open) {
    open = &new_gathered_run(spec, shared_bytes, shared_bytes, /*packed=*/true);
    ++open->tensors;  // held open
  }
  offset = open->packed_bytes;
  open->packed_bytes += spec.padded_bytes;
  open->shares.push_back({spec.share, offset, spec.padded_bytes / ranks_->size()});
  return *open;
}

Run& FrameCache::new_gathered_run(const GatheredSpec& spec, std::size_t bytes, std::size_t page_bytes, bool packed) {
  auto owned = std::make_unique<Run>();
  Run& run = *owned;
  run.role = spec.role;
  run.tier = spec.share->tier();
  run.bytes = bytes;
  run.page_bytes = page_bytes;
  run.pages = std::vector<Page>(ceil_div(bytes, page_bytes));
  run.home = home_.get();
  run.number = spec.number;
  run.is_gathered = true;
  run.is_packed = packed;
  run.shares.reserve(1);
  runs_.add(std::move(owned));
  return run;
}

}  // namespace zeropage
