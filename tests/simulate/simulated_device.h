// A device with memory of its own, of the simulation: operators, uploads and downloads run as late as they may, and
// each call is a scheduling point. Threads share a stream, or have one of two.
#pragma once

#include <utility>

#include "pager/queued_device.h"
#include "simulate/scheduler.h"

namespace zeropage::simulate {

class SimulatedDevice final : public DeviceMemory {
 public:
  SimulatedDevice(Threads& threads, std::size_t bytes, int streams)
      : threads_(threads), queues_(bytes), streams_(streams) {}

  /// An operator of the program: it runs later.
  void run(std::function<void()> work) { turn().run(std::move(work)); }
  /// The same, and returns when it has run. No other thread runs meanwhile.
  void run_now(std::function<void()> work) {
    QueuedDevice& queues = turn();
    queues.run(std::move(work));
    queues.wait(queues.record());
  }
  void finish_all() { queues_.finish_all(); }
  void finish() override { turn().finish(); }

  std::span<std::byte> region() override { return queues_.region(); }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override { turn().copy(to, from, bytes); }
  void clear(std::byte* at, std::size_t bytes) override { turn().clear(at, bytes); }
  Event record() override { return turn().record(); }
  void stream_wait(const Event& event) override { turn().stream_wait(event); }
  Event upload(std::byte* to, const std::byte* from, std::size_t bytes) override {
    return turn().upload(to, from, bytes);
  }
  Event download(std::byte* to, const std::byte* from, std::size_t bytes, const Event& after) override {
    return turn().download(to, from, bytes, after);
  }
  void retire(std::span<std::byte> memory, const Event& event) override { turn().retire(memory, event); }
  void reuse(std::span<std::byte> memory) override { turn().reuse(memory); }
  bool done(const Event& event) override {
    // Time helps now and then, although nothing waits.
    QueuedDevice& queues = turn();
    if (one_in(threads_.random(), 16)) queues.finish_transfers();
    return queues.done(event);
  }
  void wait(const Event& event) override { turn().wait(event); }
  bool registers_host() const override { return false; }
  std::shared_ptr<void> register_host(std::span<std::byte>) override { return nullptr; }

 private:
  /// A scheduling point. Then the queues, set to the calling thread's stream.
  QueuedDevice& turn() {
    threads_.yield('q');
    queues_.use_stream(threads_.self() % streams_);
    return queues_;
  }

  Threads& threads_;
  QueuedDevice queues_;
  const int streams_;
};

}  // namespace zeropage::simulate
