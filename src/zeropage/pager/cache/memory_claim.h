// Memory that a cache keeps for one thread's page pins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace zeropage {

class FrameCache;

/// Memory kept for this thread's page pins. Move-only.
class MemoryClaim {
 public:
  MemoryClaim() = default;
  MemoryClaim(MemoryClaim&& other) noexcept { *this = std::move(other); }
  MemoryClaim& operator=(MemoryClaim&& other) noexcept {
    std::swap(cache_, other.cache_);
    std::swap(bytes_, other.bytes_);
    std::swap(thread_, other.thread_);
    return *this;
  }
  ~MemoryClaim();

 private:
  friend class FrameCache;
  std::shared_ptr<FrameCache> cache_;
  std::size_t bytes_ = 0;
  std::uint64_t thread_ = 0;
};

}  // namespace zeropage
