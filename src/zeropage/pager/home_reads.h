// Reads of pages that are on disk alone, past the cache: for what goes through everything once, as saving does, and
// should not drive out what operators use.
//
// Contract: takes the cache's lock, and never while waiting.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

#include "zeropage/pager/home.h"
#include "zeropage/pager/monitor.h"

namespace zeropage {

/// A read under way. Move-only. The destructor blocks until it ends.
class HomeRead {
 public:
  HomeRead() = default;
  HomeRead(HomeRead&& other) noexcept { *this = std::move(other); }
  HomeRead& operator=(HomeRead&& other) noexcept;
  ~HomeRead();

  /// Returns when it has ended: true if what was read is the page's content now, false if that changed meanwhile.
  /// Throws DiskError if it could not be read.
  [[nodiscard]] bool wait();
  explicit operator bool() const { return state_ != nullptr; }

 private:
  friend class HomeReads;
  struct State;
  std::shared_ptr<State> state_;
};

class HomeReads {
 public:
  /// `home`: of the cache's runs; null where none of them is on disk.
  HomeReads(Monitor& monitor, Home* home) : monitor_(monitor), home_(home) {}

  /// As FrameCache says of it.
  HomeRead start(const Segment& segment, std::size_t page, std::byte* into);
  std::size_t bytes() const;
  /// Of what nothing writes (pager/snapshots.h), after all that a program waits for. Under the lock.
  HomeRead start_frozen(const Backing& backing, std::uint64_t offset, std::size_t bytes, std::byte* into);

 private:
  friend class HomeRead;
  HomeRead start(std::size_t bytes, const std::function<std::optional<Home::Outcome>(Home::Done)>& begin);
  Monitor& monitor_;
  Home* const home_;
  std::size_t bytes_ = 0;
};

}  // namespace zeropage
