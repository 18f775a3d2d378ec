// Io over io_uring: one ring, and one thread that submits and reaps. Only that thread submits, because the kernel
// cancels a thread's requests when it ends, and programs' threads end. Buffers are not registered: on huge pages that
// gains nothing (bench-io), and registered memory cannot be mapped anew.
//
// [Note: who is interrupted] If all cores compute, an ordinary thread that wakes for a completion interrupts an
// operator's thread, and the operator's other threads wait for that one: thousands of times a step. While no request
// is demanded, this thread therefore has the policy SCHED_BATCH. The kernel then lets it wait for the end of a time
// slice, and it finds several completions at once. If it comes so late that nothing is in flight any more, although
// requests waited, it takes the ordinary policy for some time. A program that has chosen another policy keeps it.
//
// A completion may wait for a lock. The thread therefore submits what is queued before each completion.
#include "zeropage/io/transfer_queue.h"

#ifdef ZEROPAGE_HAS_LIBURING
#include <fmt/format.h>
#include <liburing.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "zeropage/base/clock.h"
#include "zeropage/base/errors.h"

namespace zeropage {
namespace {

// Requests in flight. 8 use all of a disk, and on some virtual disks 64 run at a third of the speed.
constexpr std::size_t kDepth = 32;
constexpr auto kUrgent = std::chrono::milliseconds(20);  // after a demand, or after this thread came late
constexpr auto kLongestWait = std::chrono::milliseconds(1000);
constexpr std::uint64_t kWakeUp = ~std::uint64_t{0} - 1;
#ifdef LIBURING_UDATA_TIMEOUT
// On kernels without a timeout for waits, liburing adds a timeout request to the ring and hides its completion.
static_assert(kWakeUp != static_cast<std::uint64_t>(LIBURING_UDATA_TIMEOUT));
#endif

class Ring final : public Io {
 public:
  static std::unique_ptr<Io> make(const IoOptions& options, std::string& why) {
    auto ring = std::unique_ptr<Ring>(new Ring(options));
    const int result = ::io_uring_queue_init(static_cast<unsigned>(ring->depth_ + 1), &ring->ring_, 0);
    if (result < 0) {
      why = fmt::format("not allowed here ({})", std::strerror(-result));
      return nullptr;
    }
    ring->open_ = true;
    ring->wake_up_ = ::eventfd(1, EFD_CLOEXEC);
    if (ring->wake_up_ < 0) {
      why = fmt::format("no eventfd ({})", std::strerror(errno));
      return nullptr;
    }
    if (const int error = ring->try_read(); error != 0) {
      why = fmt::format("cannot read here ({})", std::strerror(error));
      return nullptr;
    }
    ring->repeated_.reserve(ring->depth_);
    for (unsigned i = 0; i < ring->depth_; ++i) ring->free_slots_.push_back(i);
    try {
      ring->thread_ = std::thread([self = ring.get()] { self->run(); });
    } catch (const std::system_error& error) {
      why = fmt::format("no thread for it ({})", error.what());
      return nullptr;
    }
    return ring;
  }

  ~Ring() override {
    if (thread_.joinable()) {
      {
        std::unique_lock lock(mutex_);
        finished_.wait(lock, [&] { return queue_.idle(); });
        closing_ = true;
        wake();
      }
      thread_.join();
    }
    if (open_) ::io_uring_queue_exit(&ring_);
    if (wake_up_ >= 0) ::close(wake_up_);
  }

  void start(const Transfer& transfer, Priority priority, Completion completion) override {
    auto state = std::make_shared<TransferState>(transfer, std::move(completion));
    std::lock_guard lock(mutex_);
    if (refused_ != 0) {
      throw DiskError(fmt::format("io_uring refuses requests: {}; set io to \"threads\"", std::strerror(refused_)));
    }
    queue_.push(std::move(state), priority);
    if (priority == Priority::demanded) demanded_at_ = Clock::now();
    wake();
  }

  void expedite(std::span<const std::byte> memory) override {
    std::lock_guard lock(mutex_);
    queue_.expedite(memory);
    demanded_at_ = Clock::now();
    wake();
  }

  void wait_all() override {
    std::unique_lock lock(mutex_);
    const std::uint64_t epoch = queue_.begin_epoch();
    finished_.wait(lock, [&] { return queue_.has_ended(epoch); });
  }

  std::string_view name() const override { return "io_uring"; }

 private:
  explicit Ring(const IoOptions& options)
      : depth_(options.depth == 0 ? kDepth : options.depth), queue_(depth_, options.block_bytes), slots_(depth_) {}

  /// Makes the thread look at the queue again. Under the lock.
  void wake() {
    if (std::exchange(woken_, true)) return;
    const std::uint64_t one = 1;
    (void)!::write(wake_up_, &one, sizeof(one));
  }

  /// Kernels before 5.6, and some sandboxes, make a ring that refuses this. Returns the errno, or 0.
  int try_read() {
    listen();
    io_uring_cqe* cqe = nullptr;
    int result = 0;
    do result = ::io_uring_submit_and_wait(&ring_, 1);
    while (result == -EINTR);
    if (result >= 0) result = ::io_uring_peek_cqe(&ring_, &cqe);
    if (result < 0) return -result;
    result = cqe->res;
    ::io_uring_cqe_seen(&ring_, cqe);
    return result < 0 ? -result : 0;
  }

  void prepare(unsigned slot) {
    const Request& request = slots_[slot];
    const Transfer& t = request.state->transfer;
    const auto bytes = static_cast<unsigned>(request.bytes);
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    t.direction == Direction::read
        ? ::io_uring_prep_read(sqe, t.file->descriptor(), request.buffer, bytes, request.offset)
        : ::io_uring_prep_write(sqe, t.file->descriptor(), request.buffer, bytes, request.offset);
    ::io_uring_sqe_set_data64(sqe, slot);
  }

  /// Only while the ring is in use: later requests are never submitted.
  void listen() {
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    ::io_uring_prep_read(sqe, wake_up_, &woken_count_, sizeof(woken_count_), 0);
    ::io_uring_sqe_set_data64(sqe, kWakeUp);
  }

  /// Chooses this thread's policy ([Note: who is interrupted]).
  void run_as_batch(bool batch) {
    if (!may_be_batch_ || std::exchange(is_batch_, batch) == batch) return;
    const sched_param none{};
    ::pthread_setschedparam(::pthread_self(), batch ? SCHED_BATCH : SCHED_OTHER, &none);
  }

  /// Returns false if the ring should close.
  bool prepare_queued() {
    for (const unsigned slot : repeated_) prepare(slot);
    repeated_.clear();
    std::unique_lock lock(mutex_);
    woken_ = false;
    const bool was_idle = free_slots_.size() == depth_;
    while (!free_slots_.empty()) {
      auto request = queue_.pop();
      if (!request) break;
      const unsigned slot = free_slots_.back();
      free_slots_.pop_back();
      slots_[slot] = std::move(*request);
      prepare(slot);
    }
    // Background requests wait for an idle disk, so this thread is never late for them.
    const bool has_more = queue_.has_queued() && !queue_.has_background();
    if (std::exchange(had_more_, has_more) && was_idle) late_at_ = Clock::now();
    look_again_ = queue_.has_background() ? kUntilIdle : kLongestWait;
    const bool goes_on = !closing_, is_urgent = Clock::now() - std::max(demanded_at_, late_at_) <= kUrgent;
    lock.unlock();
    run_as_batch(!is_urgent);
    return goes_on;
  }

  /// Waits for the kernel only if no completion is due.
  int submit() {
    if (over_) return ::io_uring_sq_ready(&ring_) > 0 ? ::io_uring_submit(&ring_) : 0;
    // Bounded, because a program that closes all files also closes the event that wakes this thread.
    __kernel_timespec longest{look_again_.count() / 1000, look_again_.count() % 1000 * 1'000'000};
    io_uring_cqe* cqe = nullptr;
    return ::io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &longest, nullptr);
  }

  void run() {
    may_be_batch_ = ::sched_getscheduler(0) == SCHED_OTHER;
    listen();
    while (prepare_queued()) {
      const int result = submit();
      const bool refused =
          result < 0 && result != -ETIME && result != -EINTR && result != -EAGAIN && result != -EBUSY;
      if (refused) return stop(-result);
      if (result == -EAGAIN) std::this_thread::sleep_for(kPause);  // the system lacks memory for a moment
      finish_next();
      reap();
      if (wake_up_error_ != 0) return stop(wake_up_error_);
    }
  }

  void reap() {
    io_uring_cqe* cqe = nullptr;
    while (::io_uring_peek_cqe(&ring_, &cqe) == 0) complete(cqe);
  }

  void finish_next() {
    if (!over_) return;
    over_->finish();
    std::lock_guard lock(mutex_);
    if (queue_.finished(*over_)) finished_.notify_all();
    over_ = std::exchange(over_->next, nullptr);
  }

  void add_over(const std::shared_ptr<TransferState>& state) {
    (over_ ? last_over_->next : over_) = state;
    last_over_ = state.get();
  }

  void complete(io_uring_cqe* cqe) {
    const std::uint64_t data = ::io_uring_cqe_get_data64(cqe);
    const int result = cqe->res;
    ::io_uring_cqe_seen(&ring_, cqe);
    if (data == kWakeUp) {
      if (result < 0 && result != -EINTR && result != -EAGAIN)
        wake_up_error_ = -result;
      else
        listen();
      return;
    }
    const auto slot = static_cast<unsigned>(data);
    const Advance outcome = advance(slots_[slot], result);
    if (outcome == Advance::again) return repeated_.push_back(slot);
    const Request request = std::move(slots_[slot]);
    free_slots_.push_back(slot);
    if (outcome == Advance::transfer_over) add_over(request.state);
    std::lock_guard lock(mutex_);
    queue_.over(request);
  }

  /// Handles a kernel that accepts no more requests. Requests that it has not taken fail at once. Those that it has
  /// taken still end, and report so in memory, without a call. Until then it may write to their buffers, which must
  /// not be freed.
  void stop(int error) {
    {
      std::lock_guard lock(mutex_);
      refused_ = error;
    }
    const unsigned taken = io_uring_smp_load_acquire(ring_.sq.khead);
    for (unsigned i = taken; i != ring_.sq.sqe_tail; ++i) {
      const std::uint64_t data = ring_.sq.sqes[i & ring_.sq.ring_mask].user_data;
      if (data < depth_) repeated_.push_back(static_cast<unsigned>(data));  // else kWakeUp, or liburing's own request
    }
    while (true) {
      reap();
      for (const unsigned slot : repeated_) {
        fail(slots_[slot], error);
        slots_[slot] = {};
        free_slots_.push_back(slot);
      }
      repeated_.clear();
      while (auto request = drain()) fail(*request, error);
      while (over_) finish_next();
      if (free_slots_.size() == depth_) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::optional<Request> drain() {
    std::lock_guard lock(mutex_);
    return queue_.drain();
  }

  void fail(Request& request, int error) {
    if (advance(request, -error) == Advance::transfer_over) add_over(request.state);
    std::lock_guard lock(mutex_);
    queue_.over(request);
  }

  std::mutex mutex_;
  std::condition_variable finished_;
  const std::size_t depth_;
  TransferQueue queue_;
  Clock::time_point demanded_at_{};  // the latest demand
  bool woken_ = false;
  bool closing_ = false;
  int refused_ = 0;  // the errno with which the kernel stopped taking requests

  // Used by the thread only:
  bool may_be_batch_ = false, is_batch_ = false;
  bool had_more_ = false;  // when it last looked, requests waited for others to end; background ones do not count
  Clock::time_point late_at_{};
  io_uring ring_{};
  bool open_ = false;
  int wake_up_ = -1;
  int wake_up_error_ = 0;  // the errno of a failed read of wake_up_: nothing would wake the thread
  std::uint64_t woken_count_ = 0;
  std::chrono::milliseconds look_again_{};
  std::vector<unsigned> free_slots_, repeated_;  // repeated: to be submitted again
  std::vector<Request> slots_;
  std::shared_ptr<TransferState> over_;  // the first of a list: transfers whose completion has not run
  TransferState* last_over_ = nullptr;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Io> make_ring(const IoOptions& options, std::string& why) { return Ring::make(options, why); }

}  // namespace zeropage

#else

namespace zeropage {

std::unique_ptr<Io> make_ring(const IoOptions&, std::string& why) {
  why = "not built in (liburing was missing)";
  return nullptr;
}

}  // namespace zeropage

#endif
