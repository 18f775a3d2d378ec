// Pins of a device's pages in the host memory below, for code that runs on the host with the device's data. Newer
// content on the device is downloaded first. A page pinned below for writing is lent. Meanwhile the device has no
// frame of it, or does not touch it, and threads that want it wait for its return.
//
// Contract: takes the lock of the device's cache, and gives it up while it waits. It waits for transfers and for room
// below, never for others' pins above: it refuses a page that they use.
#pragma once

#include <deque>

#include "zeropage/pager/cache/memory_claim.h"
#include "zeropage/pager/cache/page_pins.h"

namespace zeropage {

class LowerPins {
 public:
  /// `lower` is null without a cache below; then no segment can be reached.
  LowerPins(Monitor& monitor, FrameMemory& memory, const Timeline& timeline, Frames& frames, Transfers& transfers,
            Runs& runs, FrameCache* lower)
      : monitor_(monitor),
        memory_(memory),
        timeline_(timeline),
        frames_(frames),
        transfers_(transfers),
        runs_(runs),
        lower_(lower) {}

  // See FrameCache.
  bool reaches(const Segment& segment) const;
  void announce(std::span<const PinRequest> requests);
  [[nodiscard]] MemoryClaim claim(std::span<const PinRequest> requests);
  [[nodiscard]] PagePin pin(Segment& segment, std::size_t index, Access access);
  void bring_down(Segment& segment) noexcept;
  /// Releases host memory whose upload has ended; waits for the oldest upload if `wait`. True if there was one. Not
  /// under a lock.
  bool tidy(bool wait);
  /// To be called before the cache below is closed.
  void close() noexcept;
  /// In a forked child, which owns nothing here.
  void abandon() noexcept;

 private:
  using Lock = Monitor::Lock;

  /// Host memory for a page whose only home is a frame on the device.
  struct Stage {
    std::unique_ptr<Segment> segment;
    DeviceMemory::Event uploaded = nullptr;
  };
  class Loan;
  class StagedLoan;

  std::vector<PinRequest> requests_below(std::span<const PinRequest> requests);
  bool bring_home(Lock& lock, Run& run, std::size_t index, Access access);
  static void lend(Run& run, std::size_t index);
  void take_back(Run& run, std::size_t index) noexcept;
  PagePin pin_staged(Lock& lock, Run& run, std::size_t index, Access access);
  std::unique_ptr<Segment> make_stage(std::size_t bytes);
  void upload(Run& run, std::size_t index, std::unique_ptr<Segment> stage, const std::byte* data) noexcept;

  Monitor& monitor_;
  FrameMemory& memory_;
  const Timeline& timeline_;
  Frames& frames_;
  Transfers& transfers_;
  Runs& runs_;
  FrameCache* const lower_;
  std::deque<Stage> uploading_;  // oldest first
};

}  // namespace zeropage
