#pragma once

#include <cstdint>
#include <cstring>

#include "failing_io.h"
#include "temporary_directory.h"
#include "zeropage/io/buffers.h"
#include "zeropage/pager/frame_cache.h"

namespace zeropage {

inline constexpr std::size_t K = kKiB;

/// A segment as a test sees it.
class TestSegment final : public Segment {
 public:
  std::byte* data = nullptr;  // null outside pins
  ~TestSegment() override {
    if (cache()) cache()->release(*this);
  }

 protected:
  void expose(std::byte* at) override { data = at; }
  void hide() override { data = nullptr; }
};

/// A pager on a small budget, with segments that hold a known pattern.
struct CacheFixture {
  TemporaryDirectory directory;
  FailingIo* io = nullptr;  // owned by the pager
  std::shared_ptr<FrameCache> cache;
  std::chrono::milliseconds memory_timeout{60'000};

  void make(std::size_t device_bytes, std::size_t host_bytes, std::size_t page_bytes = 4 * kBlockBytes,
            bool failing = false, std::shared_ptr<DeviceMemory> device = nullptr) {
    std::unique_ptr<Io> engine;
    if (failing) {
      auto made = std::make_unique<FailingIo>();
      io = made.get();
      engine = std::move(made);
    }
    cache = FrameCache::make({.device_bytes = device_bytes,
                              .host_bytes = host_bytes,
                              .disk_path = directory.path(),
                              .page_bytes = page_bytes,
                              .io = {},
                              .memory_timeout = memory_timeout,
                              .device = std::move(device)},
                             std::move(engine));
  }

  std::unique_ptr<TestSegment> segment(std::size_t bytes, Role role = Role::parameter, Tier tier = Tier::disk) {
    auto made = std::make_unique<TestSegment>();
    cache->bind(*made, {bytes, 0, role, tier});
    return made;
  }

  void write(TestSegment& segment, unsigned seed) {
    const PinRequest request{&segment, Access::overwrite};
    cache->pin({&request, 1});
    for (std::size_t i = 0; i < segment.bytes(); ++i) segment.data[i] = pattern(seed, i);
    cache->unpin({&request, 1});
  }

  bool holds(TestSegment& segment, unsigned seed) {
    const PinRequest request{&segment, Access::read};
    cache->pin({&request, 1});
    bool same = true;
    for (std::size_t i = 0; i < segment.bytes(); ++i) same = same && segment.data[i] == pattern(seed, i);
    cache->unpin({&request, 1});
    return same;
  }

  // For snapshots, in pages of 16 KiB:

  /// Whether what was frozen is the pattern of `seed`, and takes it from where it is. Zeros: seed 0.
  bool save(const FrozenSegment& frozen, unsigned seed) {
    bool same = true;
    for (std::size_t i = 0; i < frozen.pages(); ++i) same = save_page(frozen, i, seed) && same;
    return same;
  }
  bool save_page(const FrozenSegment& frozen, std::size_t i, unsigned seed) {
    const auto is = [&](const std::byte* data) {
      for (std::size_t k = 0; k < frozen.bytes_of(i); ++k) {
        if (data[k] != pattern(seed, i * 16 * K + k)) return false;
      }
      return true;
    };
    if (frozen.place(i) == Frozen::Place::nowhere) return seed == 0;
    if (frozen.place(i) != Frozen::Place::home) {
      const PagePin pin = frozen.try_pin(i);
      if (pin && frozen.begin_copy(i)) {
        const bool same = is(pin.data());
        frozen.end_copy(i);
        return same;
      }
    }
    HomeRead read = frozen.read(i, buffer.get());
    return read.wait() && is(buffer.get());
  }
  Buffer buffer = make_buffer(16 * K);

  static std::byte pattern(unsigned seed, std::size_t i) {
    return static_cast<std::byte>(((i >> 3) * 0x9E3779B97F4A7C15 + i + seed * 40503u) >> 24);
  }
};

}  // namespace zeropage
