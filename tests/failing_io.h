// A disk that fails or stalls on demand, behind the seam.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "zeropage/io/transfer_queue.h"

namespace zeropage {

class FailingIo final : public Io {
 public:
  FailingIo() : thread_([this] { work(); }) {}
  ~FailingIo() override {
    stall(false);
    wait_all();
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  std::atomic<int> reads = 0, writes = 0;

  /// Called for each request before it runs; a result other than 1 is reported instead: -errno, or 0 for end of file.
  void set_outcome(std::function<long(const Transfer&)> outcome) {
    std::lock_guard lock(mutex_);
    outcome_ = std::move(outcome);
  }
  /// While it stalls, nothing that was started ends.
  void stall(bool stalls) {
    std::lock_guard lock(mutex_);
    stalls_ = stalls;
    changed_.notify_all();
  }

  void start(const Transfer& transfer, Priority priority, Completion completion) override {
    (transfer.direction == Direction::read ? reads : writes) += 1;
    auto state = std::make_shared<TransferState>(transfer, std::move(completion));
    std::lock_guard lock(mutex_);
    queue_.push(std::move(state), priority);
    changed_.notify_all();
  }
  void wait_all() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.idle(); });
  }
  std::string_view name() const override { return "failing"; }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      std::optional<Request> request;
      changed_.wait(lock, [&] { return closing_ || (!stalls_ && (request = queue_.pop())); });
      if (!request) return;
      const Transfer& t = request->state->transfer;
      long result = outcome_(t);
      lock.unlock();
      if (result == 1) {
        const int file = t.file->descriptor();
        const auto offset = static_cast<off_t>(request->offset);
        result = t.direction == Direction::read ? ::pread(file, request->buffer, request->bytes, offset)
                                                : ::pwrite(file, request->buffer, request->bytes, offset);
      }
      const Advance outcome = advance(*request, result);
      if (outcome == Advance::transfer_over) request->state->finish();
      lock.lock();
      if (outcome == Advance::again) {
        queue_.again(std::move(*request));
        continue;
      }
      queue_.over(*request);
      if (outcome == Advance::transfer_over) queue_.finished();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  TransferQueue queue_{4};
  std::function<long(const Transfer&)> outcome_ = [](const Transfer&) { return 1L; };
  bool stalls_ = false, closing_ = false;
  std::thread thread_;
};

}  // namespace zeropage
