// Snapshots of segments, for a checkpoint that is written while training goes on.
//
// [Note: snapshots] A frozen run and its checkpoint share the run's places at home, and nothing writes there any
// more. Training writes home to new places (Run::own). The old ones are released when neither the run nor the
// checkpoint needs them. No byte moves, and freezing takes no time. Content that is newer in a frame than at home has
// no such place. An operator that is about to write such a page waits until the page is written home or the
// checkpoint has copied it (Transfers::make_writable). The checkpoint always copies frames that are homes.
//
// Contract: each call takes the cache's lock. One thread uses a FrozenSegment at a time.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "zeropage/pager/cache/page_pins.h"
#include "zeropage/pager/cache/transfers.h"
#include "zeropage/pager/homes/home_reads.h"

namespace zeropage {

class FrameCache;
class Snapshots;

/// A segment's content as of FrameCache::freeze(). Move-only; its destructor releases what it holds. The segment must
/// outlive it.
class FrozenSegment {
 public:
  FrozenSegment() = default;
  FrozenSegment(FrozenSegment&& other) noexcept { *this = std::move(other); }
  FrozenSegment& operator=(FrozenSegment&& other) noexcept;
  ~FrozenSegment();

  std::size_t pages() const;
  Frozen::Place place(std::size_t page) const;
  /// For a page at home: starts to read it into `into`, of its bytes rounded up to whole blocks. Transfers that a
  /// program waits for go first.
  [[nodiscard]] HomeRead read(std::size_t page, std::byte* into) const;
  /// For a page in a frame: true if the caller may copy it now, from a pin for reading, and then call end_copy().
  /// False if it has been written home.
  [[nodiscard]] bool begin_copy(std::size_t page) const;
  void end_copy(std::size_t page) const;
  /// Pins the page for reading, for a copy that waits for nothing. Empty if it is not in memory, or lent.
  [[nodiscard]] PagePin try_pin(std::size_t page) const;
  std::size_t bytes_of(std::size_t page) const { return sizes_[page]; }
  /// Whether that memory is a device's.
  bool is_on_device() const;
  explicit operator bool() const { return frozen_ != nullptr; }

 private:
  friend class Snapshots;
  Snapshots* snapshots_ = nullptr;
  std::shared_ptr<FrameCache> cache_;  // kept alive by this
  Segment* segment_ = nullptr;
  std::shared_ptr<Frozen> frozen_;
  std::vector<std::size_t> sizes_;  // bytes of each page
};

class Snapshots {
 public:
  Snapshots(Monitor& monitor, Transfers& transfers, HomeReads& home_reads)
      : monitor_(monitor), transfers_(transfers), home_reads_(home_reads) {}

  /// See FrameCache.
  FrozenSegment freeze(std::shared_ptr<FrameCache> cache, Segment& segment);
  /// For a run of a device: downloads newer pages.
  void write_home(Monitor::Lock& lock, Run& run);
  /// After close(): releases everything.
  void close() noexcept;

 private:
  friend class FrozenSegment;
  using Lock = Monitor::Lock;

  void write_behind(Lock& lock, Run& run) noexcept;
  void let_go(FrozenSegment& segment) noexcept;

  Monitor& monitor_;
  Transfers& transfers_;
  HomeReads& home_reads_;
  std::vector<std::weak_ptr<Frozen>> alive_;
};

}  // namespace zeropage
