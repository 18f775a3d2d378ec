// Io over a pool of threads that call preadv and pwritev: for kernels and containers without io_uring.
#include <sys/uio.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "zeropage/io/transfer_state.h"

namespace zeropage {
namespace {

constexpr int kThreads = 16;  // requests in flight: 8 leave some of the reads of one disk unused

class ThreadPoolIo final : public Io {
 public:
  ThreadPoolIo() {
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { work(); });
  }

  ~ThreadPoolIo() override {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Ticket submit(const Transfer& transfer) override {
    auto state = std::make_shared<Ticket::State>(transfer);
    {
      std::lock_guard lock(mutex_);
      cut_into_requests(state, [&](Request request) {
        queue_.push_back(std::move(request)), ++unfinished_;
        wake_.notify_one();
      });
    }
    return Ticket(this, std::move(state));
  }

  void wait_all() override {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return unfinished_ == 0; });
  }

  std::string_view name() const override { return "threads"; }

 protected:
  void wait(Ticket::State& state) override {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return done(state); });
  }

  bool done(const Ticket::State& state) override { return state.requests_left.load(std::memory_order_acquire) == 0; }

 private:
  static long transfer(const Request& request) {
    const Transfer& t = request.state->transfer;
    const iovec range{request.buffer, request.bytes};
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t result = t.direction == Direction::read ? ::preadv(t.file->descriptor(), &range, 1, offset)
                                                          : ::pwritev(t.file->descriptor(), &range, 1, offset);
    return result < 0 ? -errno : result;
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Request request = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      while (advance(request, transfer(request))) {
      }
      lock.lock();
      --unfinished_;
      finished_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::deque<Request> queue_;
  std::size_t unfinished_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Io> make_threads() { return std::make_unique<ThreadPoolIo>(); }

}  // namespace zeropage
