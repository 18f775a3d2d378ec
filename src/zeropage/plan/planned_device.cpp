#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/plan/machine.h"

namespace zeropage {
namespace {

/// An event is the time of its completion, which is known at the request because streams run in order.
class PlannedDevice final : public DeviceMemory {
 public:
  PlannedDevice(std::shared_ptr<Machine> machine, std::size_t bytes) : machine_(std::move(machine)) {
    mapped_ = round_up(bytes, kBlockBytes) + kBlockBytes;
    base_ = ::mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) {
      throw BudgetError("cannot have " + format_bytes(bytes) + " of addresses to plan with: " + std::strerror(errno));
    }
    region_ = {static_cast<std::byte*>(base_), bytes};
  }
  ~PlannedDevice() override { ::munmap(base_, mapped_); }

  std::span<std::byte> region() override { return region_; }
  void copy(std::byte*, const std::byte*, std::size_t bytes) override {
    machine_->compute_later(2 * static_cast<double>(bytes) / machine_->speeds.device_memory);
  }
  void clear(std::byte*, std::size_t bytes) override {
    machine_->compute_later(static_cast<double>(bytes) / machine_->speeds.device_memory);
  }
  Event record() override { return event(machine_->stream_ready()); }
  void finish() override { wait(record()); }
  void stream_wait(const Event& event) override {
    if (event) machine_->stream_waits(time_of(event), machine_->idle_for_link);
  }
  std::shared_ptr<void> aside() override {
    return {this, [machine = machine_, before = std::exchange(machine_->is_aside, true)](void*) {
              machine->is_aside = before;
            }};
  }

  Event upload(std::byte* to, const std::byte*, std::size_t bytes) override {
    return transfer(machine_->uploads, after_uses({to, bytes}), bytes, machine_->speeds.upload);
  }
  Event download(std::byte*, const std::byte*, std::size_t bytes, const Event& after) override {
    return transfer(machine_->downloads, after ? time_of(after) : Time(), bytes, machine_->speeds.download);
  }

  void retire(std::span<std::byte> memory, const Event& event) override {
    if (!event) return;
    std::erase_if(retired_, [&](const Retired& retired) { return retired.until <= now(); });
    retired_.push_back({memory, time_of(event)});
  }
  void reuse(std::span<std::byte> memory) override {
    machine_->stream_waits(after_uses(memory), machine_->idle_for_link);
  }

  bool done(const Event& event) override { return !event || time_of(event) <= now(); }
  void wait(const Event& event) override {
    const Booking booking(Spent::device);
    if (event) machine_->clock.advance_to(time_of(event));
  }
  bool registers_host() const override { return true; }
  std::shared_ptr<void> register_host(std::span<std::byte>) override { return nullptr; }

 private:
  using Time = Clock::time_point;
  struct Retired {
    std::span<std::byte> memory;
    Time until;
  };

  Time now() const { return machine_->clock.now(); }
  static Event event(Time when) { return std::make_shared<Time>(when); }
  static Time time_of(const Event& event) { return *std::static_pointer_cast<Time>(event); }

  Event transfer(Machine::Server& link, Time after, std::size_t bytes, double speed) {
    const Time served = link.serve(std::max(now(), after), static_cast<double>(bytes) / speed);
    return event(VirtualClock::after(served, machine_->speeds.link_latency));
  }
  /// The time from which retired memory may be used again.
  Time after_uses(std::span<std::byte> memory) const {
    Time latest{};
    for (const Retired& retired : retired_) {
      const bool apart = retired.memory.data() + retired.memory.size() <= memory.data() ||
                         memory.data() + memory.size() <= retired.memory.data();
      if (!apart) latest = std::max(latest, retired.until);
    }
    return latest;
  }

  const std::shared_ptr<Machine> machine_;
  void* base_ = nullptr;
  std::size_t mapped_ = 0;
  std::span<std::byte> region_;
  std::vector<Retired> retired_;
};

}  // namespace

std::shared_ptr<DeviceMemory> make_planned_device(std::shared_ptr<Machine> machine, std::size_t bytes) {
  return std::make_shared<PlannedDevice>(std::move(machine), bytes);
}

}  // namespace zeropage
