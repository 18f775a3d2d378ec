// A device whose memory is apart and whose work runs as late as it may: queues (two streams of operators, uploads,
// downloads) that nothing moves but waiting. A caller that forgets stream_wait() or wait() meets stale bytes.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "zeropage/store/device_memory.h"

namespace zeropage {

class QueuedDevice final : public DeviceMemory {
 public:
  explicit QueuedDevice(std::size_t bytes) : memory_(bytes + 4096) {}

  /// Sets the stream of the requests that follow: 0 or 1.
  void use_stream(int stream) {
    std::lock_guard lock(mutex_);
    current_ = &operators_[stream];
  }
  /// An operator of the test's, on the stream in use.
  void run(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    current_->push(std::move(work));
  }
  void finish_transfers() {
    std::lock_guard lock(mutex_);
    uploads_.run_until(uploads_.asked);
    downloads_.run_until(downloads_.asked);
  }
  /// Runs everything.
  void finish() {
    std::lock_guard lock(mutex_);
    for (Queue* queue : {&operators_[0], &operators_[1], &uploads_, &downloads_}) queue->run_until(queue->asked);
  }
  std::size_t registered = 0;       // bytes, now
  std::function<void()> on_waited;  // called at the end of each wait()
  std::atomic<bool> fail_uploads = false;
  std::atomic<bool> is_lost = false;     // done() and wait() throw
  std::atomic<bool> fails_wait = false;  // the next wait() throws, once

  std::span<std::byte> region() override {
    auto* aligned =
        reinterpret_cast<std::byte*>((reinterpret_cast<std::size_t>(memory_.data()) + 4095) / 4096 * 4096);
    return {aligned, memory_.size() - 4096};
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    current_->push([=] { std::memmove(to, from, bytes); });
  }
  void clear(std::byte* at, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    current_->push([=] { std::memset(at, 0, bytes); });
  }
  Event record() override {
    std::lock_guard lock(mutex_);
    return event_after(*current_);
  }
  void stream_wait(const Event& event) override {
    std::lock_guard lock(mutex_);
    after(*current_, event);
  }
  Event upload(std::byte* to, const std::byte* from, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    if (fail_uploads) throw std::runtime_error("the device is lost");
    after_retired(uploads_, {to, bytes});
    uploads_.push([=] { std::memcpy(to, from, bytes); });
    return event_after(uploads_);
  }
  Event download(std::byte* to, const std::byte* from, std::size_t bytes, const Event& last_use) override {
    std::lock_guard lock(mutex_);
    after(downloads_, last_use);
    downloads_.push([=] { std::memcpy(to, from, bytes); });
    return event_after(downloads_);
  }
  void retire(std::span<std::byte> memory, const Event& event) override {
    std::lock_guard lock(mutex_);
    if (event) retired_.emplace_back(memory, event);
  }
  void reuse(std::span<std::byte> memory) override {
    std::lock_guard lock(mutex_);
    after_retired(*current_, memory);
  }
  bool done(const Event& event) override {
    std::lock_guard lock(mutex_);
    if (!event) return true;
    if (is_lost) throw std::runtime_error("the device is lost");
    const auto& point = *std::static_pointer_cast<Point>(event);
    return point.queue->ran >= point.position;
  }
  void wait(const Event& event) override {
    std::unique_lock lock(mutex_);
    if (!event) return;
    if (is_lost) throw std::runtime_error("the device is lost");
    if (waits_ == 0 && fails_wait.exchange(false)) throw std::runtime_error("an operator on the device failed");
    const auto& point = *std::static_pointer_cast<Point>(event);
    ++waits_;
    point.queue->run_until(point.position);  // whose work may wait too
    const bool is_outermost = --waits_ == 0;
    lock.unlock();
    if (is_outermost && on_waited) on_waited();
  }
  bool registers_host() const override { return true; }
  std::shared_ptr<void> register_host(std::span<std::byte> memory) override {
    registered += memory.size();
    return {nullptr, [this, bytes = memory.size()](void*) { registered -= bytes; }};
  }

 private:
  int waits_ = 0;               // within each other
  std::recursive_mutex mutex_;  // transfers start on threads of the Io too
  struct Queue {
    std::deque<std::function<void()>> work;
    std::size_t asked = 0, ran = 0;

    void push(std::function<void()> item) { work.push_back(std::move(item)), ++asked; }
    void run_until(std::size_t position) {
      while (ran < position) {
        auto item = std::move(work.front());
        work.pop_front();
        item();
        ++ran;
      }
    }
  };
  struct Point {
    Queue* queue;
    std::size_t position;
  };

  static Event event_after(Queue& queue) { return std::make_shared<Point>(Point{&queue, queue.asked}); }
  void after(Queue& queue, const Event& event) {
    if (event && std::static_pointer_cast<Point>(event)->queue != &queue) queue.push([this, event] { wait(event); });
  }

  void after_retired(Queue& queue, std::span<std::byte> memory) {
    std::erase_if(retired_, [&](const auto& retired) { return done(retired.second); });
    for (const auto& [other, event] : retired_) {
      if (other.data() < memory.data() + memory.size() && memory.data() < other.data() + other.size()) {
        after(queue, event);
      }
    }
  }

  std::vector<std::byte> memory_;
  Queue operators_[2], uploads_, downloads_;
  Queue* current_ = &operators_[0];
  std::vector<std::pair<std::span<std::byte>, Event>> retired_;
};

}  // namespace zeropage
