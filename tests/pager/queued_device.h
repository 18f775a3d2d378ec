// A device whose memory is apart and whose work runs as late as it may: queues (two streams of operators, uploads,
// downloads) that nothing moves but waiting. A caller that forgets stream_wait() or wait() meets stale bytes.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "zeropage/store/device_memory.h"

namespace zeropage {

class QueuedDevice final : public DeviceMemory {
 public:
  explicit QueuedDevice(std::size_t bytes) : memory_(bytes + 4096) {}
  /// More memory of the same device.
  QueuedDevice(std::size_t bytes, const QueuedDevice& other) : memory_(bytes + 4096), queues_(other.queues_) {}

  /// Sets the stream of the requests that follow: 0 or 1.
  void use_stream(int stream) {
    std::lock_guard lock(queues_->mutex);
    queues_->current = &queues_->operators[stream];
  }
  /// An operator of the test's, on the stream in use.
  void run(std::function<void()> work) {
    std::lock_guard lock(queues_->mutex);
    queues_->current->push(std::move(work));
  }
  /// Runs what was asked of one stream, and what that waits for.
  void finish_stream(int stream) {
    std::lock_guard lock(queues_->mutex);
    queues_->operators[stream].run_until(queues_->operators[stream].asked);
  }
  void finish_transfers() {
    std::lock_guard lock(queues_->mutex);
    queues_->uploads.run_until(queues_->uploads.asked);
    queues_->downloads.run_until(queues_->downloads.asked);
  }
  /// Runs everything.
  void finish_all() {
    std::lock_guard lock(queues_->mutex);
    for (Queue* queue : {&queues_->operators[0], &queues_->operators[1], &queues_->uploads, &queues_->downloads})
      queue->run_until(queue->asked);
  }
  std::size_t registered = 0;  // bytes, now
  bool runs_operators_at_once = false;
  std::function<void()> on_waited;    // called at the end of each wait()
  std::function<void()> on_download;  // called once, when a download is asked for
  std::atomic<bool> fail_uploads = false;
  std::atomic<bool> is_lost = false;     // clear(), done() and wait() throw
  std::atomic<bool> fails_wait = false;  // the next wait() throws, once

  std::span<std::byte> region() override {
    auto* aligned =
        reinterpret_cast<std::byte*>((reinterpret_cast<std::size_t>(memory_.data()) + 4095) / 4096 * 4096);
    return {aligned, memory_.size() - 4096};
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    std::lock_guard lock(queues_->mutex);
    queues_->current->push([=] { std::memmove(to, from, bytes); });
    keep_up();
  }
  void clear(std::byte* at, std::size_t bytes) override {
    std::lock_guard lock(queues_->mutex);
    if (is_lost) throw std::runtime_error("the device is lost");
    queues_->current->push([=] { std::memset(at, 0, bytes); });
    keep_up();
  }
  Event record() override {
    std::lock_guard lock(queues_->mutex);
    return event_after(*queues_->current);
  }
  void finish() override { finish_stream(queues_->current == &queues_->operators[1]); }
  void stream_wait(const Event& event) override {
    std::lock_guard lock(queues_->mutex);
    after(*queues_->current, event);
    keep_up();
  }
  Event upload(std::byte* to, const std::byte* from, std::size_t bytes) override {
    std::lock_guard lock(queues_->mutex);
    if (fail_uploads) throw std::runtime_error("the device is lost");
    after_retired(queues_->uploads, {to, bytes});
    return push(queues_->uploads, [=] { std::memcpy(to, from, bytes); });
  }
  Event download(std::byte* to, const std::byte* from, std::size_t bytes, const Event& last_use) override {
    if (const auto call = std::exchange(on_download, nullptr)) call();
    std::lock_guard lock(queues_->mutex);
    after(queues_->downloads, last_use);
    return push(queues_->downloads, [=] { std::memcpy(to, from, bytes); });
  }
  void retire(std::span<std::byte> memory, const Event& event) override {
    std::lock_guard lock(queues_->mutex);
    if (event) queues_->retired.emplace_back(memory, event);
  }
  void reuse(std::span<std::byte> memory) override {
    std::lock_guard lock(queues_->mutex);
    after_retired(*queues_->current, memory);
    keep_up();
  }
  bool done(const Event& event) override {
    std::lock_guard lock(queues_->mutex);
    if (!event) return true;
    if (is_lost) throw std::runtime_error("the device is lost");
    const auto& point = *std::static_pointer_cast<Point>(event);
    return point.queue->ran >= point.position;
  }
  void wait(const Event& event) override {
    std::unique_lock lock(queues_->mutex);
    if (!event) return;
    if (is_lost) throw std::runtime_error("the device is lost");
    if (queues_->waits == 0 && fails_wait.exchange(false))
      throw std::runtime_error("an operator on the device failed");
    const auto& point = *std::static_pointer_cast<Point>(event);
    ++queues_->waits;
    point.queue->run_until(point.position);  // whose work may wait too
    const bool is_outermost = --queues_->waits == 0;
    lock.unlock();
    if (is_outermost && on_waited) on_waited();
  }
  bool registers_host() const override { return true; }
  std::shared_ptr<void> register_host(std::span<std::byte> memory) override {
    registered += memory.size();
    return {nullptr, [this, bytes = memory.size()](void*) { registered -= bytes; }};
  }

 private:
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
  struct Queues {
    int waits = 0;               // within each other
    std::recursive_mutex mutex;  // transfers start on threads of the Io too
    Queue operators[2], uploads, downloads;
    Queue* current = &operators[0];
    std::vector<std::pair<std::span<std::byte>, Event>> retired;
  };
  struct Point {
    Queue* queue;
    std::size_t position;
  };

  void keep_up() {
    if (runs_operators_at_once) queues_->current->run_until(queues_->current->asked);
  }
  /// Returns the event after the work. All or nothing.
  static Event push(Queue& queue, std::function<void()> work) {
    auto event = std::make_shared<Point>(Point{&queue, queue.asked + 1});
    queue.push(std::move(work));
    return event;
  }
  static Event event_after(Queue& queue) { return std::make_shared<Point>(Point{&queue, queue.asked}); }
  void after(Queue& queue, const Event& event) {
    if (event && std::static_pointer_cast<Point>(event)->queue != &queue) queue.push([this, event] { wait(event); });
  }

  void after_retired(Queue& queue, std::span<std::byte> memory) {
    std::erase_if(queues_->retired, [&](const auto& retired) { return done(retired.second); });
    for (const auto& [other, event] : queues_->retired) {
      if (other.data() < memory.data() + memory.size() && memory.data() < other.data() + other.size()) {
        after(queue, event);
      }
    }
  }

  std::vector<std::byte> memory_;
  std::shared_ptr<Queues> queues_ = std::make_shared<Queues>();
};

}  // namespace zeropage
