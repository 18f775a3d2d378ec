// The content of segments at one moment, for a checkpoint that is written while training goes on.
//
// [Note: snapshots] To freeze a run is to hold the places where its pages lie at home together with it, so that
// nothing writes there any more: what training writes home from then on goes to places of its own (Run::own), and
// what was there is given up when neither the run nor the checkpoint needs it. So no byte moves, and freezing takes
// no time. What is newer in a frame than at home has no such place: until it has been written home, or copied by the
// checkpoint, an operator that is about to write the page waits (Transfers::make_writable). Frames that are homes
// must be copied so.
//
// Contract: each call takes the cache's lock. One thread uses a FrozenSegment at a time.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "zeropage/pager/home_reads.h"
#include "zeropage/pager/page_pins.h"
#include "zeropage/pager/transfers.h"

namespace zeropage {

class FrameCache;
class Snapshots;

/// A segment's content as it was when FrameCache::freeze was called. Move-only; what it holds is given up when it
/// dies. The segment must outlive it.
class FrozenSegment {
 public:
  FrozenSegment() = default;
  FrozenSegment(FrozenSegment&& other) noexcept { *this = std::move(other); }
  FrozenSegment& operator=(FrozenSegment&& other) noexcept;
  ~FrozenSegment();

  std::size_t pages() const;
  Frozen::Place place(std::size_t page) const;
  /// Of a page that is at home: starts to read it into `into`, of its bytes rounded up to whole blocks, after all
  /// that a program waits for.
  [[nodiscard]] HomeRead read(std::size_t page, std::byte* into) const;
  /// Of a page that is in a frame: true if the caller may copy it there now, from a pin for reading, and then call
  /// end_copy. False if it has been written home.
  [[nodiscard]] bool begin_copy(std::size_t page) const;
  void end_copy(std::size_t page) const;
  /// For reading. Empty if it is not in memory, or lent.
  [[nodiscard]] PagePin try_pin(std::size_t page) const;
  std::size_t bytes_of(std::size_t page) const { return sizes_[page]; }
  /// Whether that is in the memory of a device.
  bool is_on_device() const;
  explicit operator bool() const { return frozen_ != nullptr; }

 private:
  friend class Snapshots;
  Snapshots* snapshots_ = nullptr;
  std::shared_ptr<FrameCache> cache_;  // lives as long
  Segment* segment_ = nullptr;
  std::shared_ptr<Frozen> frozen_;
  std::vector<std::size_t> sizes_;  // bytes, of pages
};

class Snapshots {
 public:
  Snapshots(Monitor& monitor, Transfers& transfers, HomeReads& home_reads)
      : monitor_(monitor), transfers_(transfers), home_reads_(home_reads) {}

  /// As FrameCache says of it.
  FrozenSegment freeze(std::shared_ptr<FrameCache> cache, Segment& segment);
  /// Of a run of a device: what is newer there comes down.
  void write_home(Monitor::Lock& lock, Run& run);
  /// Of a closed cache: nothing is held any more.
  void close() noexcept;

 private:
  friend class FrozenSegment;
  using Lock = Monitor::Lock;

  void let_go(FrozenSegment& segment) noexcept;

  Monitor& monitor_;
  Transfers& transfers_;
  HomeReads& home_reads_;
  std::vector<std::weak_ptr<Frozen>> alive_;
};

}  // namespace zeropage
