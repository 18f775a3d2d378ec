// A disk that fails, stalls or is slow on demand, behind the seam.
#pragma once

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/io/transfer_queue.h"

namespace zeropage {

class FailingIo final : public Io {
 public:
  explicit FailingIo(int threads = 1) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~FailingIo() override {
    stall(false);
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return queue_.idle(); });
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::atomic<int> reads = 0, writes = 0;

  /// Called for each request before it runs, on its thread; a result other than 1 is reported instead: -errno, or 0
  /// for end of file.
  void set_outcome(std::function<long(const Transfer&)> outcome) {
    std::lock_guard lock(mutex_);
    outcome_ = std::make_shared<std::function<long(const Transfer&)>>(std::move(outcome));
  }
  /// While it stalls, nothing that was started ends.
  void stall(bool stalls) {
    std::lock_guard lock(mutex_);
    stalls_ = stalls;
    changed_.notify_all();
  }

  /// The n-th start of a read from now on throws, once; `waits`: after all that was started before has ended.
  void refuse_start(int n, bool waits) { refused_ = n, refused_waits_ = waits; }

  void start(const Transfer& transfer, Priority priority, Completion completion) override {
    if (transfer.direction == Direction::read && refused_ > 0 && --refused_ == 0) {
      if (refused_waits_)
        while (requests_ > 0) std::this_thread::yield();
      throw DiskError("refused");
    }
    ++requests_;
    (transfer.direction == Direction::read ? reads : writes) += 1;
    auto state = std::make_shared<TransferState>(transfer, std::move(completion));
    std::lock_guard lock(mutex_);
    queue_.push(std::move(state), priority);
    changed_.notify_all();
  }
  void expedite(std::span<const std::byte> memory) override {
    std::lock_guard lock(mutex_);
    queue_.expedite(memory);
  }
  void wait_all() override {
    std::unique_lock lock(mutex_);
    const std::uint64_t epoch = queue_.begin_epoch();
    changed_.wait(lock, [&] { return queue_.has_ended(epoch); });
  }
  std::string_view name() const override { return "failing"; }

 private:
  /// Operators may write to a page that is on its way home, which is then written again. The thread sanitizer would
  /// call it a race if it saw the call.
  static long write(int file, const std::byte* from, std::size_t bytes, off_t offset) {
    return ::syscall(SYS_pwrite64, file, from, bytes, offset);
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      std::optional<Request> request;
      while (!closing_ && (stalls_ || !(request = queue_.pop()))) changed_.wait_for(lock, kUntilIdle);
      if (!request) return;
      const Transfer& t = request->state->transfer;
      const auto outcome_of = outcome_;
      lock.unlock();
      Advance outcome = Advance::again;
      while (outcome == Advance::again) outcome = advance(*request, run(*request, (*outcome_of)(t)));
      if (outcome == Advance::transfer_over) request->state->finish(), --requests_;
      lock.lock();
      queue_.over(*request);
      if (outcome == Advance::transfer_over) queue_.finished(*request->state);
      changed_.notify_all();
    }
  }

  static long run(const Request& request, long outcome) {
    if (outcome != 1) return outcome;
    const Transfer& t = request.state->transfer;
    const int file = t.file->descriptor();
    const auto offset = static_cast<off_t>(request.offset);
    const long result = t.direction == Direction::read ? ::pread(file, request.buffer, request.bytes, offset)
                                                       : write(file, request.buffer, request.bytes, offset);
    return result < 0 ? -errno : result;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  TransferQueue queue_{4, kMiB};
  std::shared_ptr<std::function<long(const Transfer&)>> outcome_ =
      std::make_shared<std::function<long(const Transfer&)>>([](const Transfer&) { return 1L; });
  bool stalls_ = false, closing_ = false;
  std::atomic<int> refused_ = 0, requests_ = 0;  // transfers that have not ended
  std::atomic<bool> refused_waits_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace zeropage
