// Tensors that are split over ranks: birth, and what a write means. [Note: gathered] in pager.h.
#include <fmt/format.h>

#include "zeropage/base/errors.h"
#include "zeropage/pager/pager.h"

namespace zeropage {

std::shared_ptr<Pager> Pager::make_gathered(std::shared_ptr<Pager> local, std::shared_ptr<Ranks> ranks,
                                            std::size_t bytes, std::shared_ptr<DeviceMemory> device) {
  return std::shared_ptr<Pager>(new Pager(std::move(local), std::move(ranks), bytes, std::move(device)));
}

Pager::Pager(std::shared_ptr<Pager> local, std::shared_ptr<Ranks> ranks, std::size_t bytes,
             std::shared_ptr<DeviceMemory> device)
    : generation_(process_generation()),
      page_bytes_(local->page_bytes_),
      device_("device_memory's part for gathered tensors", bytes),
      host_("host_memory", 0),
      memory_(std::move(device)),
      local_(std::move(local)),
      gathers_(std::make_unique<Gathers>(*local_, std::move(ranks), memory_.get())),
      arena_(memory_ ? std::make_unique<Arena>(memory_->region())
                     : std::make_unique<Arena>(bytes, [](std::span<std::byte>) {})),
      policy_(make_least_recently_used()) {}

void Pager::bind_gathered(Segment& segment, const GatheredSpec& spec) {
  check_usable();
  std::lock_guard lock(mutex_);
  std::size_t offset = 0;
  Run& run = gathered_run_for(spec, offset);
  ++run.tensors;
  segment.pager_ = shared_from_this();
  segment.run_ = &run;
  segment.offset_ = offset;
  segment.bytes_ = spec.bytes;
}

/// Small tensors take their places in a page one after another, and no place is taken twice: which is whose follows
/// from births alone, not from deaths.
Run& Pager::gathered_run_for(const GatheredSpec& spec, std::size_t& offset) {
  const std::size_t shared_bytes = round_up(std::max(page_bytes_ / 4, kBlockBytes), kBlockBytes);
  if (spec.alone || spec.padded_bytes > shared_bytes / 4) {
    Run& run = new_gathered_run(spec, spec.padded_bytes, spec.page_bytes);
    run.shares.push_back({spec.share, 0, 0});
    return run;
  }
  Run*& open = open_[spec.role];
  if (open && open->packed_bytes + spec.padded_bytes > open->bytes) {
    Run& full = *std::exchange(open, nullptr);
    if (--full.tensors == 0) delete_run(full);
  }
  if (!open) {
    open = &new_gathered_run(spec, shared_bytes, shared_bytes);
    ++open->tensors;  // held open
  }
  offset = open->packed_bytes;
  open->packed_bytes += spec.padded_bytes;
  open->shares.push_back({spec.share, offset, spec.padded_bytes / gathers_->ranks()});
  return *open;
}

Run& Pager::new_gathered_run(const GatheredSpec& spec, std::size_t bytes, std::size_t page_bytes) {
  auto owned = std::make_unique<Run>();
  Run& run = *owned;
  run.role = spec.role;
  run.tier = spec.share->tier();
  run.bytes = bytes;
  run.page_bytes = page_bytes;
  run.pages = std::vector<Page>(ceil_div(bytes, page_bytes));
  run.number = spec.number;
  runs_.emplace(&run, std::move(owned));
  return run;
}

void Pager::store(Segment& segment) {
  check_usable();
  std::lock_guard lock(mutex_);
  for (Page& page : segment.run_->pages) {
    if (page.state == Residency::dirty && page.frame->pins == 0) evict_frame(*page.frame);
  }
}

void Pager::share_changes(Segment& segment) {
  check_usable();
  std::lock_guard lock(mutex_);
  for (Page& page : segment.run_->pages) {
    if (page.frame && page.frame->pins > 0) {
      throw AccessError(
          "a tensor that is split over ranks cannot be updated while it is pinned; let go of zeropage.pinned(tensor) "
          "first");
    }
    if (page.frame) evict_frame(*page.frame);
    page.state = Residency::home;
  }
}

}  // namespace zeropage
