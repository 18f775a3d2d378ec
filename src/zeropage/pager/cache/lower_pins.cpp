#include "zeropage/pager/cache/lower_pins.h"

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/pager/cache/gate.h"
#include "zeropage/pager/lower_segment.h"

namespace zeropage {

/// A page that the cache above lends, from begin() until the loan's end.
class LowerPins::Loan : public PageLoan {
 public:
  Loan(LowerPins& pins, Run& run, std::size_t index) : pins_(pins), run_(run), index_(index) {}
  ~Loan() override {
    if (begun_) pins_.take_back(run_, index_);
  }
  /// Under the lock.
  void begin() {
    lend(run_, index_);
    begun_ = true;
  }

 protected:
  LowerPins& pins_;
  Run& run_;
  const std::size_t index_;

 private:
  bool begun_ = false;
};

/// The same for a page whose home is on the device: host writes are uploaded at the end.
class LowerPins::StagedLoan final : public Loan {
 public:
  StagedLoan(LowerPins& pins, Run& run, std::size_t index, Access access) : Loan(pins, run, index), access_(access) {}
  ~StagedLoan() override {
    // A page that the caller did not wait for is unchanged.
    if (stage_ && access_ != Access::read && waited_for) pins_.upload(run_, index_, std::move(stage_), data_);
  }
  /// A pin of the host memory for the page.
  PagePin pin_stage() {
    stage_ = pins_.make_stage(run_.bytes_of(index_));
    PagePin pin = pins_.lower_->pin_page(*stage_, 0, Access::overwrite);
    data_ = pin.data();
    return pin;
  }

 private:
  const Access access_;
  std::unique_ptr<Segment> stage_;
  const std::byte* data_ = nullptr;
};

bool LowerPins::reaches(const Segment& segment) const {
  return lower_ && !frames_.is_gathered() && !segment.run()->shares_page();
}

/// The segments below those that have one.
std::vector<PinRequest> LowerPins::requests_below(std::span<const PinRequest> requests) {
  monitor_.check_usable();
  const Lock lock(monitor_.mutex());
  monitor_.check_usable();
  std::vector<PinRequest> below;
  for (const PinRequest& request : requests) {
    if (Segment* const segment = request.segment->run()->below.get()) below.push_back({segment, request.access});
  }
  return below;
}

// The caller's segments keep the runs below alive.

void LowerPins::announce(std::span<const PinRequest> requests) {
  if (const auto below = requests_below(requests); !below.empty()) lower_->announce(below);
}

MemoryClaim LowerPins::claim(std::span<const PinRequest> requests) {
  const auto below = requests_below(requests);
  return below.empty() ? MemoryClaim() : lower_->claim(below);
}

PagePin LowerPins::pin(Segment& segment, std::size_t index, Access access) {
  monitor_.check_usable();
  Lock lock(monitor_.mutex());
  monitor_.check_usable();
  Run& run = *segment.run();
  if (!run.home) return pin_staged(lock, run, index, access);
  if (!bring_home(lock, run, index, access)) return {};
  auto made = std::make_unique<Loan>(*this, run, index);
  if (access != Access::read) made->begin();
  const Inside inside(monitor_);
  const Unlocked unlocked(lock);
  auto loan = std::move(made);                                     // destroyed without the lock
  if (access != Access::read) run.home->finish_reads(run, index);  // an upload may still read it
  PagePin pin = lower_->pin_page(*run.below, index, access);
  pin.keep(std::move(loan));
  return pin;
}

/// Returns when the page below is the newest copy and, unless it is only read, the only one. False if it is in use
/// above.
bool LowerPins::bring_home(Lock& lock, Run& run, std::size_t index, Access access) {
  const Page& page = run.pages[index];
  while (true) {
    monitor_.check_usable();
    const Obstacle in_the_way = obstacle(run, index, Intent::lend);
    const bool is_free = in_the_way == Obstacle::none || in_the_way == Obstacle::newer;
    if (!is_free && in_the_way != Obstacle::moving) return false;
    if (!page.frame) return true;
    Frame& frame = *page.frame;
    const auto wait_for_transfers = [&] {
      transfers_.wait_until(lock, [&] { return page.frame != &frame || frame.transfers == 0; }, Cause::content);
    };
    if (in_the_way == Obstacle::moving) {
      transfers_.wait_for_reads(lock, frame);
      wait_for_transfers();
    } else if (Frames::is_dirty(frame)) {
      const std::size_t failed_before = transfers_.failed_writes();
      transfers_.write_back(lock, frame, Priority::demanded);
      wait_for_transfers();
      transfers_.throw_failed_write(failed_before);
    } else if (access == Access::read) {
      return true;
    } else {
      frames_.evict(frame);
    }
  }
}

/// Keeps the run alive as a transfer in flight does.
void LowerPins::lend(Run& run, std::size_t index) {
  Page& page = run.pages[index];
  if (run.home) page.state = Residency::evicted;
  page.lent = true;
  ++run.changes;
  ++run.lent;
  ++run.transfers;
}

void LowerPins::take_back(Run& run, std::size_t index) noexcept {
  if (monitor_.in_forked_child()) return;
  const Lock lock(monitor_.mutex());
  run.pages[index].lent = false;
  --run.lent;
  if (--run.transfers == 0 && run.dead) runs_.remove(run);
  monitor_.changed().notify_all();
}

/// Pins a page whose home is a frame on the device.
PagePin LowerPins::pin_staged(Lock& lock, Run& run, std::size_t index, Access access) {
  Page& page = run.pages[index];
  Frame& frame = *page.frame;
  // Refuses pages that a checkpoint has yet to copy: its thread and the loan would wait for each other.
  if (page.lent || frame.pins > 0 || run.is_owed(index)) return {};
  auto made = std::make_unique<StagedLoan>(*this, run, index, access);
  made->begin();
  const bool reads = access != Access::overwrite;
  if (reads) transfers_.count(0, round_up(run.bytes_of(index), kBlockBytes));
  const auto after = frame.last_used ? frame.last_used : frame.ready;
  const std::byte* const from = FrameMemory::address(run, index);
  const Inside inside(monitor_);
  const Unlocked unlocked(lock);
  auto loan = std::move(made);  // destroyed without the lock
  PagePin pin = loan->pin_stage();
  DeviceMemory& device = *memory_.device();
  if (reads) device.wait(device.download(pin.data(), from, run.bytes_of(index), after));
  pin.keep(std::move(loan));
  return pin;
}

/// Throws BudgetError.
std::unique_ptr<Segment> LowerPins::make_stage(std::size_t bytes) {
  constexpr std::size_t kMost = 4;  // uploads in flight
  while (tidy(/*wait=*/false)) {
  }
  while (true) {
    std::size_t under_way = 0;
    {
      const Lock lock(monitor_.mutex());
      under_way = uploading_.size();
    }
    if (under_way >= kMost && tidy(/*wait=*/true)) continue;
    try {
      auto stage = std::make_unique<LowerSegment>();
      lower_->bind(*stage, {bytes, 0, Role::parameter, Tier::host, bytes, /*alone=*/true, /*is_staging=*/true});
      return stage;
    } catch (const BudgetError&) {
      if (!tidy(/*wait=*/true)) throw;
    }
  }
}

void LowerPins::upload(Run& run, std::size_t index, std::unique_ptr<Segment> stage, const std::byte* data) noexcept {
  if (monitor_.in_forked_child()) return;
  const Lock lock(monitor_.mutex());
  Frame* const frame = run.pages[index].frame;
  if (monitor_.closed() || !frame) return;
  try {
    DeviceMemory& device = *memory_.device();
    uploading_.push_back({std::move(stage)});
    std::byte* const at = FrameMemory::address(run, index);
    device.retire({at, run.bytes_of(index)}, frame->last_used ? frame->last_used : frame->ready);
    uploading_.back().uploaded = device.upload(at, data, run.bytes_of(index));
    frame->ready = frame->last_used = uploading_.back().uploaded;
    transfers_.count(round_up(run.bytes_of(index), kBlockBytes), 0);
  } catch (...) {
    frame->failure = std::current_exception();  // the frame's content is lost: its next users get the error
  }
}

bool LowerPins::tidy(bool wait) {
  Stage ended;
  {
    const Lock lock(monitor_.mutex());
    if (uploading_.empty()) return false;
    Stage& oldest = uploading_.front();
    if (!wait && !memory_.device()->done(oldest.uploaded)) return false;
    ended = std::move(oldest);
    uploading_.pop_front();
  }
  memory_.device()->wait(ended.uploaded);
  return true;
}

void LowerPins::bring_down(Segment& segment) noexcept {
  if (!reaches(segment) || monitor_.in_forked_child()) return;
  Lock lock(monitor_.mutex());
  if (monitor_.closed()) return;
  Run& run = *segment.run();
  const auto next = timeline_.plan().next_use(run.ordinal);
  if (!run.home || (next.begin != AccessPlan::kNever && next.access != Access::read)) return;
  try {
    for (std::size_t i = 0; i < run.pages.size(); ++i) {
      Frame* const frame = run.pages[i].frame;
      if (!frame || frame->first_page != i || frame->pins > 0 || frame->transfers > 0) continue;
      if (Frames::is_dirty(*frame) && !transfers_.write_back(lock, *frame, Priority::behind)) return;
    }
  } catch (...) {
    // The write starts again when it is needed, and throws its error then.
  }
}

void LowerPins::close() noexcept {
  std::deque<Stage> uploading;
  {
    const Lock lock(monitor_.mutex());
    uploading.swap(uploading_);
  }
  for (const Stage& stage : uploading) {
    try {
      memory_.device()->wait(stage.uploaded);
    } catch (...) {  // a lost device reads nothing
    }
  }
}

void LowerPins::abandon() noexcept { new auto(std::move(uploading_)); }

}  // namespace zeropage
