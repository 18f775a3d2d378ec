#include "zeropage/space/torch_device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {
namespace {

/// Makes our own operators ordinary ones, whatever scope or grad mode the caller is in.
struct Ordinary {
  c10::impl::ExcludeDispatchKeyGuard below_us{kPagedKeys};
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

/// cudaHostRegister and cudaHostUnregister, from the runtime that torch has loaded, if any. Other backends of torch
/// have functions of the same names with their own prefix instead of "cuda".
struct HostRegistration {
  int (*add)(void*, std::size_t, unsigned) = nullptr;
  int (*remove)(void*) = nullptr;
  int (*last_error)() = nullptr;  // reading it clears it, so that torch does not mistake our error for its own

  explicit HostRegistration(const std::string& backend) {
    find(backend + "HostRegister", add);
    find(backend + "HostUnregister", remove);
    find(backend + "GetLastError", last_error);
  }
  template <class Function>
  static void find(const std::string& name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name.c_str()));
  }
  explicit operator bool() const { return add && remove && last_error; }
};

/// The pieces of host memory that are registered. cudaMemcpyAsync refuses a copy that is not within one of them, or
/// outside all.
class Registered {
 public:
  void add(const std::byte* begin, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    pieces_[begin] = bytes;
  }
  void remove(const std::byte* begin) {
    std::lock_guard lock(mutex_);
    pieces_.erase(begin);
  }
  /// The bytes from `at` on, at most `bytes`, that one copy may move.
  std::size_t one_copy(const std::byte* at, std::size_t bytes) const {
    std::lock_guard lock(mutex_);
    const auto next = pieces_.upper_bound(at);
    if (next != pieces_.begin()) {
      const auto& [begin, size] = *std::prev(next);
      if (at < begin + size) return std::min(bytes, static_cast<std::size_t>(begin + size - at));
    }
    return next == pieces_.end() ? bytes : std::min(bytes, static_cast<std::size_t>(next->first - at));
  }

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, std::size_t> pieces_;
};

class TorchDevice final : public DeviceMemory {
 public:
  TorchDevice(c10::Device device, std::size_t bytes)
      : device_(device),
        driver_(device.type()),
        uploads_(driver_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
        downloads_(driver_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {
    Ordinary ordinary;
    // One block more, because torch aligns to less than our blocks.
    memory_ =
        at::empty({static_cast<std::int64_t>(bytes + kBlockBytes)}, at::TensorOptions(device).dtype(c10::kByte));
    auto* data = static_cast<std::byte*>(memory_.data_ptr());
    region_ = {reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::size_t>(data), kBlockBytes)), bytes};
    stream_wait(record(driver_.getStream(device_)), uploads_);  // the block's former user may still be at work
  }

  ~TorchDevice() override {
    // torch may give the block to other tensors, and does not know our streams.
    for (const auto& stream :
         {std::optional(uploads_), std::optional(downloads_), gathers_, std::optional(driver_.getStream(device_))}) {
      try {
        if (stream) stream->synchronize();
      } catch (...) {  // a lost device does nothing more
      }
    }
  }

  std::span<std::byte> region() override { return region_; }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    Ordinary ordinary;
    on_device(to, bytes).copy_(on_device(const_cast<std::byte*>(from), bytes));
  }
  void clear(std::byte* at, std::size_t bytes) override {
    Ordinary ordinary;
    on_device(at, bytes).zero_();
  }

  Event record() override { return record(driver_.getStream(device_)); }
  void finish() override { driver_.getStream(device_).synchronize(); }
  void stream_wait(const Event& event) override { stream_wait(event, driver_.getStream(device_)); }
  std::shared_ptr<void> aside() override {
    std::lock_guard lock(mutex_);
    if (!gathers_) {
      gathers_ = driver_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
      stream_wait(record(driver_.getStream(device_)), *gathers_);  // as uploads do, from the first
    }
    return std::make_shared<c10::StreamGuard>(*gathers_);
  }

  Event upload(std::byte* to, const std::byte* from_host, std::size_t bytes) override {
    Ordinary ordinary;
    wait_for_retired({to, bytes}, uploads_);
    c10::StreamGuard on(uploads_);
    return in_parts(from_host, bytes, uploads_, [&](std::size_t at, std::size_t part) {
      on_device(to + at, part).copy_(in_host(const_cast<std::byte*>(from_host) + at, part), /*non_blocking=*/true);
    });
  }
  Event download(std::byte* to_host, const std::byte* from, std::size_t bytes, const Event& after) override {
    Ordinary ordinary;
    stream_wait(after, downloads_);
    c10::StreamGuard on(downloads_);
    return in_parts(to_host, bytes, downloads_, [&](std::size_t at, std::size_t part) {
      in_host(to_host + at, part).copy_(on_device(const_cast<std::byte*>(from) + at, part), /*non_blocking=*/true);
    });
  }

  void retire(std::span<std::byte> memory, const Event& event) override {
    if (!event) return;
    std::lock_guard lock(mutex_);
    std::erase_if(retired_, [&](const Retired& retired) { return done(retired.event); });
    retired_.push_back({memory, event});
  }
  void reuse(std::span<std::byte> memory) override { wait_for_retired(memory, driver_.getStream(device_)); }

  bool done(const Event& event) override { return !event || point(event).event.query(); }
  void wait(const Event& event) override {
    const Booking booking(Spent::device);
    if (event) point(event).event.synchronize();
  }

  bool registers_host() const override { return static_cast<bool>(registration()); }
  std::shared_ptr<void> register_host(std::span<std::byte> memory) override {
    static const HostRegistration& registration = this->registration();
    if (!registration) return nullptr;
    c10::DeviceGuard here(device_);
    if (registration.add(memory.data(), memory.size(), /*flags=*/0) != 0) {
      registration.last_error();
      return nullptr;
    }
    std::shared_ptr<void> handle(memory.data(), [pieces = registered_](void* data) {
      pieces->remove(static_cast<std::byte*>(data));
      if (registration.remove(data) != 0) registration.last_error();
    });
    registered_->add(memory.data(), memory.size());
    return handle;
  }

 private:
  struct Point {
    c10::Event event;
    c10::Stream stream;
  };
  const HostRegistration& registration() const {
    static const HostRegistration found(c10::DeviceTypeName(device_.type(), /*lower_case=*/true));
    return found;
  }
  struct Retired {
    std::span<std::byte> memory;
    Event event;
  };
  /// Calls copy(offset, bytes) for each part of the host's memory that one copy may move. Returns the event after
  /// them. If it throws, no part is under way any more: the memory may be used otherwise then.
  template <class Copy>
  Event in_parts(const std::byte* host, std::size_t bytes, const c10::Stream& stream, const Copy& copy) {
    try {
      for (std::size_t done = 0, part = 0; done < bytes; done += part) {
        part = registered_->one_copy(host + done, bytes - done);
        copy(done, part);
      }
      return record(stream);
    } catch (...) {
      stream.synchronize();
      throw;
    }
  }
  /// Makes `stream` wait for retired memory. Entries stay for other streams until their event is done.
  void wait_for_retired(std::span<std::byte> memory, const c10::Stream& stream) {
    std::lock_guard lock(mutex_);
    for (const Retired& retired : retired_) {
      const bool apart = retired.memory.data() + retired.memory.size() <= memory.data() ||
                         memory.data() + memory.size() <= retired.memory.data();
      if (!apart) stream_wait(retired.event, stream);
    }
  }
  static Point& point(const Event& event) { return *std::static_pointer_cast<Point>(event); }

  static Event record(const c10::Stream& stream) {
    auto made = std::make_shared<Point>(Point{c10::Event(stream.device_type()), stream});
    made->event.record(stream);
    return made;
  }
  static void stream_wait(const Event& event, const c10::Stream& stream) {
    if (event && point(event).stream != stream) point(event).event.block(stream);
  }

  at::Tensor on_device(std::byte* at, std::size_t bytes) const {
    return at::from_blob(
        at, {static_cast<std::int64_t>(bytes)}, [](void*) {}, at::TensorOptions(device_).dtype(c10::kByte), device_);
  }
  static at::Tensor in_host(std::byte* at, std::size_t bytes) {
    return at::from_blob(at, {static_cast<std::int64_t>(bytes)}, c10::kByte);
  }

  c10::Device device_;
  c10::impl::VirtualGuardImpl driver_;
  c10::Stream uploads_, downloads_;
  std::optional<c10::Stream> gathers_;  // from the first aside() on
  at::Tensor memory_;
  std::span<std::byte> region_;
  std::mutex mutex_;
  std::vector<Retired> retired_;
  std::shared_ptr<Registered> registered_ = std::make_shared<Registered>();
};

/// Operators on the CPU finish before they return, so nothing needs an event.
class CpuApart final : public DeviceMemory {
 public:
  explicit CpuApart(std::size_t bytes) : arena_(bytes), memory_(*arena_.try_allocate(bytes)) {}

  std::span<std::byte> region() override { return {memory_.data(), memory_.bytes()}; }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void clear(std::byte* at, std::size_t bytes) override { std::memset(at, 0, bytes); }
  Event record() override { return nullptr; }
  void finish() override {}
  void stream_wait(const Event&) override {}
  Event upload(std::byte* to, const std::byte* from_host, std::size_t bytes) override {
    const Booking copies(Spent::copies);
    std::memcpy(to, from_host, bytes);
    return nullptr;
  }
  Event download(std::byte* to_host, const std::byte* from, std::size_t bytes, const Event&) override {
    const Booking copies(Spent::copies);
    std::memcpy(to_host, from, bytes);
    return nullptr;
  }
  void retire(std::span<std::byte>, const Event&) override {}
  void reuse(std::span<std::byte>) override {}
  bool done(const Event&) override { return true; }
  void wait(const Event&) override {}
  bool registers_host() const override { return false; }
  std::shared_ptr<void> register_host(std::span<std::byte>) override { return nullptr; }

 private:
  Arena arena_;
  Block memory_;
};

}  // namespace

std::shared_ptr<DeviceMemory> make_torch_device(c10::Device device, std::size_t bytes) {
  try {
    return std::make_shared<TorchDevice>(device, bytes);
  } catch (const c10::OutOfMemoryError&) {
    throw BudgetError(fmt::format("device_memory = {} is more than {} has free ({}); lower device_memory",
                                  format_bytes(bytes), device.str(), format_bytes(free_device_memory(device))));
  }
}

std::shared_ptr<DeviceMemory> make_cpu_apart(std::size_t bytes) { return std::make_shared<CpuApart>(bytes); }

std::size_t free_device_memory(c10::Device device) {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  return allocator ? allocator->getMemoryInfo(device.index()).first : 0;
}

}  // namespace zeropage
