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
  std::exception_ptr error;

  void wait() {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return done; });
  }
};

Ticket::~Ticket() {
  if (state_) state_->wait();
}

void Ticket::wait() {
  if (!state_) return;
  const auto state = std::exchange(state_, nullptr);
  state->wait();
  if (state->error) std::rethrow_exception(state->error);
}

bool Ticket::done() const {
  if (!state_) return true;
  std::lock_guard lock(state_->mutex);
  return state_->done;
}

Ticket Io::submit(const Transfer& transfer, Priority priority) {
  auto state = std::make_shared<Ticket::State>();
  start(transfer, priority, [state](std::exception_ptr error) {
    std::lock_guard lock(state->mutex);
    state->done = true;
    state->error = std::move(error);
    state->ended.notify_all();
  });
  Ticket ticket;  // of a transfer that has started: nothing would end another one
  ticket.state_ = std::move(state);
  return ticket;
}

void Io::sync(const File& file) {
  wait_all();
  file.sync();
}

std::unique_ptr<Io> make_io(IoEngine engine) {
  if (engine == IoEngine::threads) return make_threads();
  std::string why;
  if (auto ring = make_ring(why)) return ring;
  if (engine == IoEngine::uring) {
    throw SettingError(fmt::format("io = \"uring\" cannot be had: {}; set io to \"threads\" or \"auto\"", why));
  }
  static std::once_flag said;
  std::call_once(said, [&] { std::fprintf(stderr, "zeropage: io_uring: %s; using threads\n", why.c_str()); });
  return make_threads();
}

}  // namespace zeropage
