// A cache of a device with memory of its own, whose work runs as late as it may.
#pragma once

#include "cache_fixture.h"
#include "queued_device.h"

namespace zeropage {

struct DeviceFixture : CacheFixture {
  std::shared_ptr<QueuedDevice> device;

  void make_apart(std::size_t device_bytes, std::size_t host_bytes, bool failing = false) {
    device = std::make_shared<QueuedDevice>(device_bytes);
    make(device_bytes, host_bytes, kPage, failing, device);
  }

  /// Asks the device for an operator on a pinned segment: `on_byte(byte, index)` for each of its bytes.
  template <class OnByte>
  void ask(TestSegment& segment, OnByte on_byte) {
    device->run([at = segment.data, bytes = segment.bytes(), on_byte] {
      for (std::size_t i = 0; i < bytes; ++i) on_byte(at[i], i);
    });
  }
  static auto writes(unsigned seed) {
    return [seed](std::byte& byte, std::size_t i) { byte = pattern(seed, i); };
  }
  /// An operator on `segment`: `on_byte(byte, index)` for each of its bytes, run later than it is asked for. Returns
  /// the event after what was asked for while the segment was pinned.
  template <class OnByte>
  DeviceMemory::Event run_later(TestSegment& segment, Access access, OnByte on_byte) {
    const PinRequest request{&segment, access};
    cache->pin({&request, 1});
    ask(segment, on_byte);
    auto event = device->record();
    cache->unpin({&request, 1});
    return event;
  }
  void write_later(TestSegment& segment, unsigned seed) { run_later(segment, Access::overwrite, writes(seed)); }
  DeviceMemory::Event check_later(TestSegment& segment, unsigned seed) {
    return run_later(segment, Access::read,
                     [seed, this](std::byte byte, std::size_t i) { wrong += byte != pattern(seed, i); });
  }
  DeviceMemory::Event check_zeros_later(TestSegment& segment) {
    return run_later(segment, Access::read, [this](std::byte byte, std::size_t) { wrong += byte != std::byte{0}; });
  }
  std::size_t wrong = 0;

  static constexpr std::size_t kPage = 4 * kBlockBytes;
};

}  // namespace zeropage
