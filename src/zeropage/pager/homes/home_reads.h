// Reads that bypass the cache, of pages that are only on disk. They serve a single pass over everything, such as
// saving, which should not evict operators' pages.
//
// Contract: takes the cache's lock, and never holds it while waiting.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

#include "zeropage/io/buffers.h"  // for callers: what is read into is aligned
#include "zeropage/pager/cache/monitor.h"
#include "zeropage/pager/homes/home.h"

namespace zeropage {

/// A read in flight. Move-only. The destructor blocks until it ends.
class HomeRead {
 public:
  HomeRead() = default;
  HomeRead(HomeRead&& other) noexcept { *this = std::move(other); }
  HomeRead& operator=(HomeRead&& other) noexcept;
  ~HomeRead();

  /// Returns when the read has ended: true if it gave the page's present content, false if that changed meanwhile.
  /// Throws DiskError if the read failed.
  [[nodiscard]] bool wait();
  explicit operator bool() const { return state_ != nullptr; }

 private:
  friend class HomeReads;
  struct State;
  std::shared_ptr<State> state_;
};

class HomeReads {
 public:
  /// `home`: of the cache's runs; null if none of them is on disk.
  HomeReads(Monitor& monitor, Home* home) : monitor_(monitor), home_(home) {}

  /// See FrameCache.
  HomeRead start(const Segment& segment, std::size_t page, std::byte* into);
  HomeRead start_before_version(const Segment& segment, std::size_t page, std::size_t at, std::size_t bytes,
                                std::byte* into);
  HomeRead start_part(const Segment& segment, std::size_t page, std::size_t at, std::size_t bytes, std::byte* into);
  std::size_t bytes() const;
  /// Reads content that nothing writes (pager/homes/snapshots.h). Transfers that a program waits for go first. Under
  /// the lock.
  HomeRead start_frozen(const Slot& slot, std::size_t bytes, std::byte* into);

 private:
  friend class HomeRead;
  HomeRead start(std::size_t bytes, const std::function<std::optional<Home::Outcome>(Home::Done)>& begin);
  static HomeRead watched(HomeRead read, const Run& run, std::size_t page);
  Monitor& monitor_;
  Home* const home_;
  std::size_t bytes_ = 0;
};

}  // namespace zeropage
