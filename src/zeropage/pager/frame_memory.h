// The memory of one cache: a budget, an arena, and the frames that lie in it, by address. The cache's lock guards it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "zeropage/page/page.h"

namespace zeropage {

/// Of a cache that stores nothing: memory is addresses alone, and what is done to its content only takes time
/// ([Note: virtual time] in base/clock.h).
struct Hollow {
  std::size_t disk_bytes;  // what the disk would hold
  double copy_rate;        // bytes a second that a thread reads and writes
};

class FrameMemory {
 public:
  FrameMemory(std::size_t bytes, std::shared_ptr<DeviceMemory> device, Arena::SlabHook on_first_use,
              std::optional<Hollow> hollow);

  /// A frame with one pin, or null: no budget for it, or no hole that is large enough (then `fragmented`).
  Frame* try_make(Run& run, std::size_t first_page, std::size_t pages, bool permanent, bool& fragmented);
  void drop(Frame& frame) noexcept;
  /// Frames that lie next to each other and, with the holes between them, make `bytes`: of all such the one whose
  /// earliest next use is the latest. `may_leave` says which frames count. Empty if there is none.
  std::vector<Frame*> window(std::size_t bytes, const std::function<bool(const Frame&)>& may_leave) const;

  /// Whether all that is free serves any frame: else frames need a hole, and `window` finds what makes one.
  bool joins_holes() const { return arena_->joins_holes(); }
  const std::shared_ptr<DeviceMemory>& device() const { return device_; }
  const std::optional<Hollow>& hollow() const { return hollow_; }
  const Budget& budget() const { return budget_; }
  std::size_t free() const { return budget_.limit() - budget_.used(); }
  const std::map<std::byte*, std::unique_ptr<Frame>>& frames() const { return frames_; }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const;
  void clear(std::byte* at, std::size_t bytes) const;
  /// What this thread does next with the frame comes after what filled it.
  void order_after(Frame& frame) const;
  /// This thread has used the frame.
  void mark_used(Frame& frame) const;
  /// In a forked child: nothing here is its own.
  void abandon() noexcept;
  void close();

  static std::size_t bytes_of(const Run& run, std::size_t first_page, std::size_t pages);
  /// Of a page that has a frame.
  static std::byte* address(const Run& run, std::size_t page);

 private:
  void take(std::size_t bytes) const;

  std::shared_ptr<DeviceMemory> device_;  // null: the CPU's
  const std::optional<Hollow> hollow_;
  Budget budget_;
  std::unique_ptr<Arena> arena_;
  std::map<std::byte*, std::unique_ptr<Frame>> frames_;
  std::uint64_t made_ = 0;  // frames
};

}  // namespace zeropage
