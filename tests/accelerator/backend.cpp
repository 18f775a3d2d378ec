// The device interfaces that torch requires: guard, hooks, generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>

#include "device.h"

namespace sim {
namespace {

template <class What>
double seconds_of(What what) {
  const auto begin = std::chrono::steady_clock::now();
  what();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// If set, streams claim that a graph captures them. No graph exists.
std::atomic<bool> captures = false;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "sim: there is one device"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return current_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_from_pool(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_from_pool(); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return set_current_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    Queue& queue = queue_of(stream);
    return queue.done(queue.asked());
  }
  void synchronizeStream(const c10::Stream& stream) const override { queue_of(stream).finish(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new std::shared_ptr<Event>;
    auto made = std::make_shared<Event>();
    made->queue = &queue_of(stream);
    made->position = made->queue->push([made] { made->when = std::chrono::steady_clock::now(); });
    *static_cast<std::shared_ptr<Event>*>(*event) = made;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    const auto other = *static_cast<std::shared_ptr<Event>*>(event);
    Queue& queue = queue_of(stream);
    if (other->queue == &queue || !waits().note(queue.id(), other->queue->id())) return;
    queue.push([other, &queue] {
      const double waited = seconds_of([&] { other->queue->wait(other->position); });
      if (other->queue->crosses_link && !queue.crosses_link) statistics().waited_seconds += waited;
    });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    const auto& point = **static_cast<std::shared_ptr<Event>*>(event);
    return !waits().note(kHost, point.queue->id()) || point.queue->done(point.position);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    const auto point = *static_cast<std::shared_ptr<Event>*>(event);
    if (!waits().note(kHost, point->queue->id())) return;
    const double waited = seconds_of([&] { point->queue->wait(point->position); });
    if (point->queue->crosses_link) statistics().host_waited_seconds += waited;
    throw_failure();
  }
  // No `override`: torch 2.11 does not ask.
  bool isStreamCapturing(const c10::Stream&) const { return captures; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    synchronizeEvent(first);
    synchronizeEvent(second);
    const auto when = [](void* event) { return (*static_cast<std::shared_ptr<Event>*>(event))->when; };
    return std::chrono::duration<double, std::milli>(when(second) - when(first)).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
    const std::size_t kept = std::min(storage.nbytes(), bytes);
    c10::DataPtr data = device_allocator()->allocate(bytes);
    if (kept) device_allocator()->copy_data(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};
[[maybe_unused]] const bool registered = [] {
  c10::register_privateuse1_backend("sim");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

/// Draws what the CPU's generator of the same seed draws.
struct Generator final : c10::GeneratorImpl {
  Generator() : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(std::uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { inner.set_offset(offset); }
  std::uint64_t get_offset() const override { return inner.get_offset(); }
  std::uint64_t current_seed() const override { return inner.current_seed(); }
  std::uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* const made = new Generator;
    made->inner = inner.clone();
    return made;
  }

  at::Generator inner = at::detail::createCPUGenerator();
};

}  // namespace

const at::Generator& default_generator() {
  static auto* const made = new at::Generator(at::make_generator<Generator>());
  return *made;
}
at::Generator new_generator() { return at::make_generator<Generator>(); }
at::Generator drawing(const at::Generator& generator) {
  const at::Generator& asked = generator.defined() ? generator : default_generator();
  TORCH_CHECK(!asked.device().is_cpu(), "Expected a 'sim' device type for generator but found 'cpu'");
  return static_cast<Generator*>(asked.unsafeGetGeneratorImpl())->inner;
}

}  // namespace sim

TORCH_LIBRARY(sim, library) {
  library.def("manual_seed(int seed) -> ()", [](std::int64_t seed) {
    sim::default_generator().unsafeGetGeneratorImpl()->set_current_seed(static_cast<std::uint64_t>(seed));
  });
  library.def("get_rng_state() -> Tensor",
              [] { return at::Tensor(sim::default_generator().unsafeGetGeneratorImpl()->get_state()); });
  library.def("set_rng_state(Tensor state) -> ()", [](const at::Tensor& state) {
    sim::default_generator().unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  });
  library.def("set_delays(int seed, int microseconds) -> ()", [](std::int64_t seed, std::int64_t microseconds) {
    sim::set_delays(static_cast<std::uint64_t>(seed), microseconds);
  });
  library.def("set_link(float bytes_per_second) -> ()", &sim::set_link);
  library.def("synchronize() -> ()", &sim::synchronize);
  library.def("set_capturing(bool captures) -> ()", [](bool captures) { sim::captures = captures; });
  library.def("leave_out_waits(int waiting, int awaited) -> ()",
              [](std::int64_t waiting, std::int64_t awaited) { sim::waits().leave_out(waiting, awaited); });
  library.def("leave_no_waits_out() -> ()", [] { sim::waits().leave_none_out(); });
  library.def("waits() -> int[]", [] { return sim::waits().counts(); });
  // In the order in which sim.py names them.
  library.def("statistics() -> float[]", [] {
    const auto& s = sim::statistics();
    return std::vector<double>{static_cast<double>(s.uploaded_bytes),
                               static_cast<double>(s.downloaded_bytes),
                               s.link_seconds,
                               s.waited_seconds,
                               s.host_waited_seconds,
                               static_cast<double>(s.operators),
                               static_cast<double>(s.synchronous_operators)};
  });
}
