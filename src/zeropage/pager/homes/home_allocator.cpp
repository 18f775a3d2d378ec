#include "zeropage/pager/homes/home_allocator.h"

#include <fmt/format.h>

#include <numeric>

#include "zeropage/base/errors.h"
#include "zeropage/pager/lower_segment.h"

namespace zeropage {
namespace {

constexpr std::size_t kSlotBytes = 64;  // ATen's own alignment of storages

/// The page size for a tensor with rows of row_bytes: a multiple of row and block if one fits.
std::size_t cut_on_rows(std::size_t page_bytes, std::size_t row_bytes) {
  if (row_bytes == 0 || row_bytes > page_bytes) return page_bytes;
  const std::size_t unit = std::lcm(row_bytes, kBlockBytes);
  return unit > page_bytes ? page_bytes : round_down(page_bytes, unit);
}

}  // namespace

Run& HomeAllocator::run_for(Lock& lock, const SegmentSpec& spec, std::size_t& offset) {
  const std::size_t shared_bytes = std::max(page_bytes_ / 4, kBlockBytes);
  if (spec.alone || spec.bytes > shared_bytes / 4) {
    return new_run(lock, spec, spec.bytes,
                   spec.page_bytes ? spec.page_bytes : cut_on_rows(page_bytes_, spec.row_bytes),
                   /*is_shared=*/false);
  }
  const std::size_t slot = round_up(std::max<std::size_t>(spec.bytes, 1), kSlotBytes);
  std::vector<Run*>& with_room = shared_[{spec.role, spec.tier}];
  while (!with_room.empty()) {
    Run& run = *with_room.back();
    run.entries.push_back(FreeList::make_entry());
    if (auto at = run.slots->take(slot)) {
      offset = *at;
      return run;
    }
    run.entries.pop_back();
    run.listed = false;  // until one of its tensors dies
    with_room.pop_back();
  }
  Run& run = new_run(lock, spec, shared_bytes, shared_bytes, /*is_shared=*/true);
  list_room(run);
  offset = *run.slots->take(slot);
  return run;
}

/// If memory is short, the run is listed when its next tensor dies.
void HomeAllocator::list_room(Run& run) noexcept try {
  if (run.listed) return;
  shared_[{run.role, run.tier}].push_back(&run);
  run.listed = true;
} catch (const std::bad_alloc&) {
}

static bool is_in_file(const SegmentSpec& spec, std::size_t page) {
  return spec.source && (spec.source_pages.empty() || spec.source_pages[page] != SegmentSpec::kNotInFile);
}

Run& HomeAllocator::new_run(Lock& lock, const SegmentSpec& spec, std::size_t bytes, std::size_t page_bytes,
                            bool is_shared) {
  auto owned = std::make_unique<Run>();
  Run& run = *owned;
  run.role = spec.role;
  run.tier = spec.tier;
  run.is_staging = spec.is_staging;
  run.bytes = std::max<std::size_t>(bytes, 1);
  run.page_bytes = page_bytes;
  run.pages = std::vector<Page>(ceil_div(run.bytes, run.page_bytes));
  if (is_shared) {
    run.slots.emplace();
    run.slots->release(0, run.bytes);
    run.entries.push_back(FreeList::make_entry());  // of its first tensor
  }
  if (memory_.device() && spec.tier != Tier::device) {
    // Not under this cache's lock: bind() may wait for transfers below that end in this cache.
    run.below = std::make_unique<LowerSegment>();
    {
      const Inside inside(monitor_);
      const Unlocked unlocked(lock);
      bind_below(*run.below, {run.bytes, spec.row_bytes, spec.role, spec.tier, page_bytes, /*alone=*/true,
                              /*is_staging=*/false, spec.source, /*is_unset=*/false, spec.source_pages});
    }
    monitor_.check_usable();
    run.home = homes_.home;
    if (spec.source) {
      for (std::size_t i = 0; i < run.pages.size(); ++i) {
        if (is_in_file(spec, i)) run.pages[i].state = Residency::evicted;
      }
    }
  } else if (spec.tier == Tier::disk) {
    if (!homes_.swap)
      throw ConfigError("a role is set to \"disk\" but disk_path is not set; set disk_path to a directory");
    run.is_on_disk = true;
    run.home = homes_.home;
    take_slots(lock, run, spec);
  } else {
    make_permanent(lock, run, /*clears=*/!spec.is_staging && (is_shared || !spec.is_unset));
  }
  runs_.add(std::move(owned));
  return run;
}

/// Gives each page its slot: a part of the file, or free space on disk.
void HomeAllocator::take_slots(Lock& lock, Run& run, const SegmentSpec& spec) {
  std::size_t missing = 0;
  for (std::size_t i = 0; i < run.pages.size(); ++i) {
    if (!is_in_file(spec, i)) {
      missing += run.bytes_of(i);
      continue;
    }
    const std::uint64_t at = spec.source_pages.empty() ? i * run.page_bytes : spec.source_pages[i];
    run.pages[i].home = std::make_shared<Slot>(SourceRange{spec.source.file, spec.source.offset + at});
    run.pages[i].state = Residency::evicted;
  }
  std::size_t next = 0;
  while (missing > 0) {
    {
      const Inside inside(monitor_);
      const Unlocked unlocked(lock);  // no other thread knows the run yet
      for (; missing > 0; ++next) {
        if (run.pages[next].home) continue;
        if (!(run.pages[next].home = run.home->try_allocate(run.bytes_of(next)))) break;
        missing -= run.bytes_of(next);
      }
    }
    monitor_.check_usable();
    if (missing > 0) transfers_.grow(lock, missing);
  }
}

/// A segment that died during its download still takes room until tidy() sees the end of that transfer.
void HomeAllocator::bind_below(Segment& segment, const SegmentSpec& spec) {
  homes_.home->tidy(/*wait=*/false);
  while (true) {
    try {
      return homes_.lower->bind(segment, spec);
    } catch (const BudgetError&) {
      if (!homes_.home->tidy(/*wait=*/true)) throw;
    }
  }
}

/// Makes the run's frame its home. `clears`: filled with zeros.
void HomeAllocator::make_permanent(Lock& lock, Run& run, bool clears) {
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
    const Grants::Claim claim = grants_.wait_for(lock, [&] { return Grants::Need{bytes, on_device ? bytes : 0}; });
    Frame& frame = room_.make_frame(lock, run, 0, run.pages.size(), /*for_long=*/true);
    try {
      if (memory_.device()) {
        if (clears) memory_.clear(frame.memory.data(), frame.memory.bytes());
        frame.ready = memory_.record();
      } else if (clears) {
        const Inside inside(monitor_);
        const Unlocked unlocked(lock);
        memory_.clear(frame.memory.data(), frame.memory.bytes());
      } else {
        memory_.poison(frame);
      }
      if (budgets_.homes_in(run.tier) + bytes > limit) refuse_home();  // another thread was quicker
    } catch (...) {
      frame.assembling = true;
      frames_.drop_pin(frame);
      throw;
    }
    for (Page& page : run.pages) page.frame = &frame, page.state = Residency::dirty;
    frames_.set_permanent(frame, true);
    frames_.drop_pin(frame);
  } catch (const Shortage&) {
    refuse_home();
  }
}

void HomeAllocator::release(Run& run, std::size_t offset, std::size_t bytes) {
  if (run.slots) {
    run.slots->release(offset, round_up(std::max<std::size_t>(bytes, 1), kSlotBytes), std::move(run.entries.back()));
    run.entries.pop_back();
    list_room(run);
  }
  if (--run.tensors == 0) let_die(run);
}

void HomeAllocator::let_die(Run& run) {
  if (run.secondary) run.secondary->share = nullptr;  // the run itself may stay: [Note: gathered]
  if (run.listed) std::erase(shared_[{run.role, run.tier}], &run);
  runs_.let_die(run);
}

/// Small tensors get their slots in a page one after another, and no slot is used twice. The layout thus follows from
/// creations alone, not from deaths.
Run& HomeAllocator::gathered_run_for(Segment& segment, const GatheredSpec& spec, std::size_t& offset) {
  const std::size_t shared_bytes = round_up(std::max(page_bytes_ / 4, kBlockBytes), kBlockBytes);
  if (spec.alone || spec.padded_bytes > shared_bytes / 4) {
    Run& run = new_gathered_run(spec, spec.padded_bytes, spec.page_bytes, /*packed=*/false);
    run.shares.push_back({spec.share, 0, 0, &segment});
    run.only = &segment;
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
  open->outdate_secondary();
  open->shares.push_back({spec.share, offset, spec.padded_bytes / homes_.ranks->size(), &segment});
  return *open;
}

Run& HomeAllocator::new_gathered_run(const GatheredSpec& spec, std::size_t bytes, std::size_t page_bytes,
                                     bool packed) {
  auto owned = std::make_unique<Run>();
  Run& run = *owned;
  run.role = spec.role;
  run.tier = spec.share->tier();
  run.bytes = bytes;
  run.page_bytes = page_bytes;
  run.pages = std::vector<Page>(ceil_div(bytes, page_bytes));
  run.home = homes_.home;
  run.number = spec.number;
  run.is_gathered = true;
  run.is_packed = packed;
  run.shares.reserve(1);
  if (homes_.secondary && run.role == Role::parameter) {
    run.secondary = std::make_unique<SecondaryPartition>();
    run.secondary->tier = *homes_.secondary;
    run.secondary->has_page.resize(run.pages.size());
  }
  runs_.add(std::move(owned));
  return run;
}

}  // namespace zeropage
