// Io over a pool of threads that call preadv and pwritev: for kernels and containers without io_uring.
#include <fmt/format.h>
#include <sys/uio.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/io/transfer_queue.h"

namespace zeropage {
namespace {

constexpr std::size_t kThreads = 16;  // requests in flight; 8 do not use all of one disk's parallel reads

class ThreadPoolIo final : public Io {
 public:
  explicit ThreadPoolIo(const IoOptions& options)
      : depth_(options.depth == 0 ? kThreads : options.depth), queue_(depth_, options.block_bytes) {
    threads_.reserve(depth_);
    try {
      while (threads_.size() < depth_) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {  // the system's thread limit: fewer will do, none will not
      if (threads_.empty()) {
        throw Error(fmt::format("no thread can be started for I/O: {}; raise the limit of threads", error.what()));
      }
    }
  }

  ~ThreadPoolIo() override {
    {
      std::unique_lock lock(mutex_);
      finished_.wait(lock, [&] { return queue_.idle(); });
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void start(const Transfer& transfer, Priority priority, Completion completion) override {
    auto state = std::make_shared<TransferState>(transfer, std::move(completion));
    std::lock_guard lock(mutex_);
    queue_.push(std::move(state), priority);
    wake_.notify_one();
  }

  void expedite(std::span<const std::byte> memory) override {
    std::lock_guard lock(mutex_);
    queue_.expedite(memory);
    wake_.notify_one();
  }

  void wait_all() override {
    std::unique_lock lock(mutex_);
    const std::uint64_t epoch = queue_.begin_epoch();
    finished_.wait(lock, [&] { return queue_.has_ended(epoch); });
  }

  std::string_view name() const override { return "threads"; }

 private:
  static long transfer(const Request& request) {
    const Transfer& t = request.state->transfer;
    const iovec range{request.buffer, request.bytes};
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t result = t.direction == Direction::read ? ::preadv(t.file->descriptor(), &range, 1, offset)
                                                          : ::pwritev(t.file->descriptor(), &range, 1, offset);
    return result < 0 ? -errno : result;
  }

  /// A thread that takes a request wakes the next one, and the one that ends a request takes another. Therefore no
  /// event wakes all threads.
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      std::optional<Request> request;
      while (!closing_ && !(request = queue_.pop())) wait(lock);
      if (!request) return;
      if (queue_.has_queued()) wake_.notify_one();
      lock.unlock();
      Advance outcome = advance(*request, transfer(*request));
      while (outcome == Advance::again) outcome = advance(*request, transfer(*request));
      if (outcome == Advance::transfer_over) request->state->finish();
      lock.lock();
      queue_.over(*request);
      if (outcome == Advance::transfer_over && queue_.finished(*request->state)) finished_.notify_all();
    }
  }

  /// One thread at most watches for the time at which background requests may start.
  void wait(std::unique_lock<std::mutex>& lock) {
    if (watched_ || !queue_.has_background()) return wake_.wait(lock);
    watched_ = true;
    wake_.wait_for(lock, kUntilIdle);
    watched_ = false;
  }

  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  const std::size_t depth_;
  TransferQueue queue_;
  bool closing_ = false;
  bool watched_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Io> make_threads(const IoOptions& options) { return std::make_unique<ThreadPoolIo>(options); }

}  // namespace zeropage
