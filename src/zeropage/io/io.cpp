#include "zeropage/io/io.h"

#include <fmt/format.h>

#include <condition_variable>
#include <cstdio>
#include <mutex>

#include "zeropage/base/errors.h"
#include "zeropage/io/transfer_queue.h"

namespace zeropage {

struct Ticket::State {
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  std::exception_ptr error;  // set before it is done, and never again

  void wait() {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return done; });
  }
};

Ticket::~Ticket() {
  if (state_) state_->wait();
}

void Ticket::wait() const {
  if (!state_) return;
  state_->wait();
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Ticket::wait_until(std::chrono::steady_clock::time_point deadline) const {
  if (!state_) return true;
  {
    std::unique_lock lock(state_->mutex);
    if (!state_->ended.wait_until(lock, deadline, [&] { return state_->done; })) return false;
  }
  wait();
  return true;
}

bool Ticket::done() const {
  if (!state_) return true;
  std::lock_guard lock(state_->mutex);
  return state_->done;
}

std::pair<Ticket, Completion> Ticket::pending() {
  Ticket ticket;
  ticket.state_ = std::make_shared<State>();
  return {std::move(ticket), [state = ticket.state_](std::exception_ptr error) {
            std::lock_guard lock(state->mutex);
            state->done = true;
            state->error = std::move(error);
            state->ended.notify_all();
          }};
}

Ticket Io::submit(const Transfer& transfer, Priority priority) {
  auto [ticket, completion] = Ticket::pending();
  try {
    start(transfer, priority, completion);
  } catch (...) {  // nothing else would end it
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
    throw SettingError(fmt::format(
        "requests of {} bytes, {} in flight, cannot be: give a multiple of 4 KiB up to 1 GiB, and 1 to {} requests",
        block, options.depth, kMostDepth));
  }
  if (options.engine == IoEngine::threads) return make_threads(options);
  std::string why;
  if (auto ring = make_ring(options, why)) return ring;
  if (options.engine == IoEngine::uring) {
    throw SettingError(fmt::format("io = \"uring\" cannot be had: {}; set io to \"threads\" or \"auto\"", why));
  }
  static std::once_flag said;
  std::call_once(said, [&] { std::fprintf(stderr, "zeropage: io_uring: %s; using threads\n", why.c_str()); });
  return make_threads(options);
}

}  // namespace zeropage
