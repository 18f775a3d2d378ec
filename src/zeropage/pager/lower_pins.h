// Pages of a device's cache, pinned in the memory below it: for code that runs on the host on what belongs to the
// device. What is newer on the device is brought down first. A page that is pinned below for writing is lent: the
// device has no frame of it then, or does not touch it, and threads that want it wait until it comes back.
//
// Contract: takes the lock of the device's cache, and gives it up while it waits. It waits for transfers and for room
// below, never for what others have pinned above: a page that they use is refused.
#pragma once

#include <deque>

#include "zeropage/pager/page_pins.h"

namespace zeropage {

class LowerPins {
 public:
  /// `lower` is null where there is no cache below; nothing can be reached then.
  LowerPins(Monitor& monitor, FrameMemory& memory, const Timeline& timeline, Frames& frames, Transfers& transfers,
            Runs& runs, FrameCache* lower)
      : monitor_(monitor),
        memory_(memory),
        timeline_(timeline),
        frames_(frames),
        transfers_(transfers),
        runs_(runs),
        lower_(lower) {}

  // As FrameCache says of them.
  bool reaches(const Segment& segment) const;
  void announce(std::span<const PinRequest> requests);
  [[nodiscard]] PagePin pin(Segment& segment, std::size_t index, Access access);
  void bring_down(Segment& segment) noexcept;
  /// Gives back what uploads have been read from; waits for the oldest of them if `wait`. True if there was any. Not
  /// under a lock.
  bool tidy(bool wait);
  /// Before the cache below goes.
  void close() noexcept;
  /// In a forked child: nothing here is its own.
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
