// The memory of one cache: a budget, an arena, and its frames by address. The cache's lock guards it.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "zeropage/page/page.h"

namespace zeropage {

/// Settings of a cache that stores nothing. Its memory is addresses alone, and work on its content only takes time
/// ([Note: virtual time] in base/clock.h).
struct Hollow {
  std::size_t disk_bytes;  // what the disk would hold
  double copy_rate;        // bytes a second that a thread reads and writes
};

class FrameMemory {
 public:
  FrameMemory(std::size_t bytes, std::shared_ptr<DeviceMemory> device, Arena::SlabHook on_first_use,
              std::optional<Hollow> hollow);

  /// A frame with one pin. Null if the budget does not allow it, or if no hole is large enough (then `fragmented`).
  /// `for_long`: apart from frames that come and go. `must`: as of Arena::try_allocate().
  Frame* try_make(Run& run, std::size_t first_page, std::size_t pages, bool for_long, bool must, bool& fragmented);
  void drop(Frame& frame) noexcept;
  /// With ZEROPAGE_POISON in the environment, for tests: fills a new frame with signalling NaN, so that a use before
  /// its first read or write shows.
  void poison(const Frame& frame) const;
  /// Neighbouring frames that make `bytes` together with the holes between them: the group whose earliest next use is
  /// latest. `may_leave` tells which frames count. Empty if there is none.
  std::vector<Frame*> window(std::size_t bytes, const std::function<bool(const Frame&)>& may_leave) const;

  /// Whether any free bytes serve any frame. If not, a frame needs a hole, and `window` finds frames that make one.
  bool joins_holes() const { return arena_->joins_holes(); }
  const std::shared_ptr<DeviceMemory>& device() const { return device_; }
  const std::optional<Hollow>& hollow() const { return hollow_; }
  const Budget& budget() const { return budget_; }
  std::size_t free() const { return budget_.limit() - budget_.used(); }
  /// The part that a frame of `bytes` can use without cutting huge pages.
  std::size_t free_for(std::size_t bytes) const { return free() - std::min(free(), arena_->useless_to(bytes)); }
  const std::map<std::byte*, std::unique_ptr<Frame>>& frames() const { return frames_; }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const;
  void clear(std::byte* at, std::size_t bytes) const;
  /// Orders this thread's next use of the frame after the transfer that filled it.
  void order_after(Frame& frame) const;
  /// Records that this thread has used the frame.
  void mark_used(Frame& frame) const;
  /// An event after this thread's requests. Null on the CPU, or after a wait for them if memory is short.
  DeviceMemory::Event record() const;
  /// In a forked child, which owns nothing here.
  void abandon() noexcept;
  void close();

  static std::size_t bytes_of(const Run& run, std::size_t first_page, std::size_t pages);
  /// The page must have a frame.
  static std::byte* address(const Run& run, std::size_t page);

 private:
  void take(std::size_t bytes) const;
  void retire(const Frame& frame) const noexcept;

  std::shared_ptr<DeviceMemory> device_;  // null: the CPU's
  const std::optional<Hollow> hollow_;
  Budget budget_;
  std::unique_ptr<Arena> arena_;
  std::map<std::byte*, std::unique_ptr<Frame>> frames_;
  std::uint64_t made_ = 0;  // frames
};

}  // namespace zeropage
