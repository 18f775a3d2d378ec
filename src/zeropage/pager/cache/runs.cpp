#include "zeropage/pager/cache/runs.h"

#include <algorithm>

#include "zeropage/base/units.h"

namespace zeropage {

void Runs::add(std::unique_ptr<Run>&& owned) try {
  Run& run = *owned;
  if (by_ordinal_.size() == by_ordinal_.capacity()) by_ordinal_.reserve(2 * by_ordinal_.size() + 8);
  bytes_of_ordinal_.reserve(by_ordinal_.capacity());
  std::unique_ptr<Run>& place = runs_[&run];
  const std::uint64_t kind =
      (run.bytes << 8) | (static_cast<std::uint64_t>(run.role) << 4) | static_cast<std::uint64_t>(run.tier);
  try {
    run.ordinal = shares_ordinal(run) ? timeline_.plan().shared(kind)
                                      : timeline_.plan().create(kind, /*take_over=*/!frames_.is_gathered());
  } catch (...) {
    runs_.erase(&run);
    throw;
  }
  // Nothing throws from here on: ordinals have no gaps.
  if (by_ordinal_.size() <= run.ordinal) {
    by_ordinal_.resize(run.ordinal + 1, nullptr);
    bytes_of_ordinal_.resize(run.ordinal + 1, 0);
  }
  by_ordinal_[run.ordinal] = &run;
  bytes_of_ordinal_[run.ordinal] = round_up(run.bytes, kBlockBytes);
  if (shares_ordinal(run)) by_ordinal_[run.ordinal] = nullptr, bytes_of_ordinal_[run.ordinal] = 0;
  count_home(run, true);
  budgets_.note_usage();
  place = std::move(owned);
} catch (...) {
  leave_frames(*owned);
  throw;
}

/// Frames of its pages go with their last pins.
void Runs::leave_frames(Run& run) noexcept {
  for (Page& page : run.pages) {
    Frame* const frame = page.frame;
    if (!frame) continue;
    Frames::forget(*frame);
    frame->run = nullptr;
    frames_.set_permanent(*frame, false);
    if (frame->pins == 0) frames_.settle(*frame);
  }
}

/// [Note: gathered] Each step creates new gradients and states. Ranks may differ in when they die, so none can reuse
/// another's ordinal. They are not gathered ahead, so one ordinal stands for all of a kind.
bool Runs::shares_ordinal(const Run& run) const { return frames_.is_gathered() && run.role != Role::parameter; }

void Runs::count_home(const Run& run, bool created) {
  // [Note: gathered] Ranks may differ in when gradients and states die.
  if (run.home && (!frames_.is_gathered() || run.role == Role::parameter)) {
    pageable_bytes_ += (created ? 1 : -1) * round_up(run.bytes, kBlockBytes);
    pageable_peak_ = std::max(pageable_peak_, pageable_bytes_);
  }
  if (run.below || frames_.is_gathered()) return;  // the lower cache counts it
  const auto role = static_cast<int>(run.role), tier = static_cast<int>(run.tier);
  if (!run.home) {
    const std::size_t frame_bytes = round_up(run.bytes, kBlockBytes);
    created ? budgets_.add_home(run.tier, frame_bytes) : budgets_.remove_home(run.tier, frame_bytes);
  }
  if (run.is_staging) return;
  std::size_t& bytes = home_bytes_[role][tier];
  bytes += created ? run.bytes : -run.bytes;
  home_peak_[role][tier] = std::max(home_peak_[role][tier], bytes);
}

std::size_t Runs::source_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [run, _] : runs_) {
    for (std::size_t i = 0; run->is_on_disk && i < run->pages.size(); ++i) {
      const Page& page = run->pages[i];
      if (page.home && page.home->source && page.state != Residency::zero) bytes += run->bytes_of(i);
    }
  }
  return bytes;
}

void Runs::let_die(Run& run) {
  // [Note: gathered] Ranks may differ in when a parameter dies, and all gather one that is planned.
  if (frames_.is_gathered() && run.role == Role::parameter) return;
  run.dead = true;
  by_ordinal_[run.ordinal] = nullptr;
  if (!shares_ordinal(run)) timeline_.plan().destroy(run.ordinal);
  count_home(run, false);
  if (run.transfers == 0) remove(run);
}

void Runs::remove(Run& run) {
  for (Page& page : run.pages) note_write(page, /*failed=*/false);
  leave_frames(run);
  if (run.below) run.home->forget(run);
  if (run.frozen) run.frozen->run = nullptr;
  runs_.erase(&run);
}

void Runs::forget_home_bytes() noexcept {
  for (auto& row : home_bytes_) std::fill(std::begin(row), std::end(row), 0);
}

void Runs::give_back_homes() noexcept {
  for (auto& [_, run] : runs_) {
    run->secondary.reset();
    for (Page& page : run->pages) page.home = page.target = nullptr;
    if (const auto frozen = std::exchange(run->frozen, nullptr)) frozen->run = nullptr;
    if (run->below) {
      run->home->forget(*run);
      run->below.reset();
    }
  }
}

}  // namespace zeropage
