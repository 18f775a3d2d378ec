// Birth and death: which run a segment lies in, and where that run is at home.
#include <fmt/format.h>

#include <numeric>

#include "zeropage/base/errors.h"
#include "zeropage/pager/pager.h"

namespace zeropage {
namespace {

constexpr std::size_t kSlotBytes = 64;  // what ATen aligns its own storages to

/// The page size for a tensor whose rows have row_bytes: a multiple of both row and block where there is one.
std::size_t cut_on_rows(std::size_t page_bytes, std::size_t row_bytes) {
  if (row_bytes == 0 || row_bytes > page_bytes) return page_bytes;
  const std::size_t unit = std::lcm(row_bytes, kBlockBytes);
  return unit > page_bytes ? page_bytes : round_down(page_bytes, unit);
}

/// A home in the host's pager, as the pager above it holds it.
class HomeBelow final : public Segment {
 public:
  ~HomeBelow() override {
    if (pager()) pager()->release(*this);
  }

 protected:
  void expose(std::byte*) override {}
  void hide() override {}
};

}  // namespace

void Pager::bind(Segment& segment, const SegmentSpec& spec) {
  check_usable();
  bool used_before = false;
  {
    std::lock_guard lock(mutex_);
    std::size_t offset = 0;
    Run& run = run_for(spec, offset);
    ++run.tensors;
    segment.pager_ = shared_from_this();
    segment.run_ = &run;
    segment.offset_ = offset;
    segment.bytes_ = spec.bytes;
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

Run& Pager::run_for(const SegmentSpec& spec, std::size_t& offset) {
  const std::size_t shared_bytes = std::max(page_bytes_ / 4, kBlockBytes);
  if (spec.bytes > shared_bytes / 4) {
    return new_run(spec, spec.bytes, spec.page_bytes ? spec.page_bytes : cut_on_rows(page_bytes_, spec.row_bytes));
  }
  const std::size_t slot = round_up(std::max<std::size_t>(spec.bytes, 1), kSlotBytes);
  for (auto& [_, run] : runs_) {
    if (!run->slots || run->role != spec.role || run->tier != spec.tier) continue;
    if (auto at = run->slots->take(slot)) {
      offset = *at;
      return *run;
    }
  }
  Run& run = new_run(spec, shared_bytes, shared_bytes);
  run.slots.emplace();
  run.slots->release(0, shared_bytes);
  offset = *run.slots->take(slot);
  return run;
}

Run& Pager::new_run(const SegmentSpec& spec, std::size_t bytes, std::size_t page_bytes) {
  auto owned = std::make_unique<Run>();
  Run& run = *owned;
  run.role = spec.role;
  run.tier = spec.tier;
  run.bytes = std::max<std::size_t>(bytes, 1);
  run.page_bytes = page_bytes;
  run.pages = std::vector<Page>(ceil_div(run.bytes, run.page_bytes));
  if (below_ && spec.tier != Tier::device) {
    run.below = std::make_unique<HomeBelow>();
    below_->bind(*run.below, {run.bytes, spec.row_bytes, spec.role, spec.tier, page_bytes});
  } else if (spec.tier == Tier::disk) {
    if (!swap_)
      throw SettingError("a role is set to \"disk\" but disk_path is not set; set disk_path to a directory");
    run.extent = swap_->allocate(run.bytes);
  } else {
    const Pool pool = spec.tier == Tier::device ? Pool::device : Pool::host;
    Frame* frame = make_frame(run, 0, run.pages.size(), pool, /*permanent=*/true);
    clear(frame->memory.data(), frame->memory.bytes());
    mark_ready(*frame);
    for (Page& page : run.pages) page.frame = frame, page.state = Residency::dirty;
    drop_pin(*frame);
  }
  count_home(run, true);
  runs_.emplace(&run, std::move(owned));
  return run;
}

void Pager::count_home(const Run& run, bool born) {
  if (run.below || run.gathered()) return;  // it is counted there
  const auto role = static_cast<int>(run.role), tier = static_cast<int>(run.tier);
  std::size_t& bytes = stats_.home_bytes[role][tier];
  bytes += born ? run.bytes : -run.bytes;
  stats_.home_peak[role][tier] = std::max(stats_.home_peak[role][tier], bytes);
}

bool Pager::has_room(Tier tier, std::size_t bytes) const {
  if (below_ && tier != Tier::device) return below_->has_room(tier, bytes);
  if (tier == Tier::disk) return swap_ != nullptr;
  const Budget& tier_budget = budget(tier == Tier::device ? Pool::device : Pool::host);
  std::lock_guard lock(mutex_);
  // Half of a budget at most: operators and rules need frames beside the homes.
  std::size_t homes = 0;
  for (const auto& row : stats_.home_bytes) homes += row[static_cast<int>(tier)];
  return homes + bytes <= tier_budget.limit() / 2;
}

void Pager::release(Segment& segment) noexcept {
  // A forked child has copies of segments that belong to its parent: nothing here is its to give back.
  if (generation_ != process_generation()) return;
  std::lock_guard lock(mutex_);
  if (closed_ || !segment.run_) return;
  Run& run = *std::exchange(segment.run_, nullptr);
  if (run.gathered()) {
    for (Share& share : run.shares) {
      if (share.offset == segment.offset_) share.segment = nullptr;
    }
  }
  if (run.slots) run.slots->release(segment.offset_, round_up(std::max<std::size_t>(segment.bytes_, 1), kSlotBytes));
  if (--run.tensors == 0) delete_run(run);
}

void Pager::delete_run(Run& run) {
  settle_for_death(run);
  for (Page& page : run.pages) {
    Frame* frame = page.frame;
    if (!frame) continue;
    if (run.gathered() && frame->pins == 0) {  // [Note: gathered]
      for (Page& other : run.pages) {
        if (other.frame == frame) other.frame = nullptr;
      }
      frame->run = nullptr;
    } else {
      drop_frame(*frame);
    }
  }
  if (run.below) uploads_->finish(*run.below);
  count_home(run, false);
  runs_.erase(&run);
}

}  // namespace zeropage
