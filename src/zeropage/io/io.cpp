#include "zeropage/io/io.h"

#include <fmt/format.h>

#include <atomic>
#include <cstdio>
#include <mutex>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/mutex.h"
#include "zeropage/base/process.h"
#include "zeropage/io/transfer_queue.h"

namespace zeropage {
namespace {

/// [Note: forked children]
class OfOneProcess final : public Io {
 public:
  explicit OfOneProcess(std::unique_ptr<Io> io) : io_(std::move(io)) {}
  ~OfOneProcess() override {
    if (is_forked()) (void)io_.release();
  }

  void start(const Transfer& transfer, Priority priority, Completion completion) override {
    check();
    io_->start(transfer, priority, std::move(completion));
  }
  void expedite(std::span<const std::byte> memory) override {
    if (!is_forked()) io_->expedite(memory);
  }
  void wait_all() override {
    check();
    io_->wait_all();
  }
  std::string_view name() const override { return io_->name(); }

 private:
  bool is_forked() const { return process_ != process_generation(); }
  void check() const {
    if (is_forked()) {
      throw AccessError("this I/O engine belongs to the process that made it: a forked child makes one of its own");
    }
  }

  std::unique_ptr<Io> io_;
  const std::uint64_t process_ = process_generation();
};

}  // namespace

struct Ticket::State {
  Mutex mutex;
  Condition ended;
  std::atomic<bool> done = false;  // changes under the lock
  std::exception_ptr error;        // set before `done`, and never again
  const std::uint64_t process = process_generation();

  /// [Note: forked children]
  bool is_lost() const { return !done && process != process_generation(); }
  void wait() {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return done.load(); });
  }
};

Ticket::~Ticket() {
  if (!state_) return;
  if (state_->process != process_generation()) {
    new auto(std::move(state_));  // destroying a condition variable waits for its threads
  } else {
    state_->wait();
  }
}

void Ticket::wait() const {
  if (!state_) return;
  if (state_->is_lost()) {
    throw AccessError("a transfer was under way when this process was forked: only the parent can wait for it");
  }
  if (!state_->done) {
    const Booking booking(Spent::disk);
    state_->wait();
  }
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Ticket::wait_until(std::chrono::steady_clock::time_point deadline) const {
  if (!done()) {
    std::unique_lock lock(state_->mutex);
    if (!state_->ended.wait_until(lock, deadline, [&] { return state_->done.load(); })) return false;
  }
  wait();
  return true;
}

bool Ticket::done() const { return !state_ || state_->done || state_->is_lost(); }

std::pair<Ticket, Completion> Ticket::pending() {
  Ticket ticket;
  ticket.state_ = std::make_shared<State>();
  return {std::move(ticket), [state = ticket.state_](std::exception_ptr error) {
            std::lock_guard lock(state->mutex);
            state->error = std::move(error);
            state->done = true;
            state->ended.notify_all();
          }};
}

Ticket Io::submit(const Transfer& transfer, Priority priority) {
  auto [ticket, completion] = Ticket::pending();
  try {
    start(transfer, priority, completion);
  } catch (...) {  // nothing else would end the ticket
    completion(nullptr);
    throw;
  }
  return std::move(ticket);
}

void Io::sync(const File& file) {
  wait_all();
  file.sync();
}

std::unique_ptr<Io> make_io(const IoOptions& options) {
  const std::size_t block = options.block_bytes;
  if (block == 0 || block % kBlockBytes != 0 || block > kGiB || options.depth > kMostDepth) {
    throw ConfigError(fmt::format(
        "an I/O block of {} bytes and a depth of {} are out of range; set the block to a multiple of 4 KiB up to "
        "1 GiB, and the depth to 1 to {}",
        block, options.depth, kMostDepth));
  }
  const auto of_one_process = [](std::unique_ptr<Io> io) { return std::make_unique<OfOneProcess>(std::move(io)); };
  if (options.engine == IoEngine::threads) return of_one_process(make_threads(options));
  std::string why;
  if (auto ring = make_ring(options, why)) return of_one_process(std::move(ring));
  if (options.engine == IoEngine::uring) {
    throw ConfigError(fmt::format("io = \"uring\" is not available: {}; set io to \"threads\" or \"auto\"", why));
  }
  static std::once_flag said;
  std::call_once(said, [&] { std::fprintf(stderr, "zeropage: io_uring: %s; using threads\n", why.c_str()); });
  return of_one_process(make_threads(options));
}

}  // namespace zeropage
