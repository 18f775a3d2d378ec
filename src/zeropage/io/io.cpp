#include "zeropage/io/io.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "zeropage/base/errors.h"
#include "zeropage/io/transfer_state.h"

namespace zeropage {
namespace {

void throw_if_failed(const Ticket::State& state) {
  const Transfer& t = state.transfer;
  const int error = state.error.load();
  const std::size_t done = state.bytes_done.load();
  if (error == 0 && done == t.bytes) return;
  throw DiskError(fmt::format(
      "{} {} at offset {} of {} failed: {}; check the disk", t.direction == Direction::read ? "reading" : "writing",
      format_bytes(t.bytes), t.offset, t.file->name(),
      error ? std::strerror(error) : fmt::format("only {} were transferred", format_bytes(done))));
}

}  // namespace

Ticket::~Ticket() {
  if (state_ && issuer_) {
    try {
      issuer_->wait(*state_);
    } catch (...) {  // a seam that throws here has no one left to tell
    }
  }
}

void Ticket::wait() {
  if (!state_) return;
  const auto state = std::exchange(state_, nullptr);
  issuer_->wait(*state);
  throw_if_failed(*state);
}

bool Ticket::done() const { return !state_ || issuer_->done(*state_); }

void Ticket::abandon() noexcept {
  // Leaked on purpose: the state's owner is the parent's ring, of which this process has only a copy.
  new std::shared_ptr<State>(std::exchange(state_, nullptr));
}

void Io::sync(const File& file) {
  wait_all();
  if (::fdatasync(file.descriptor()) != 0) {
    throw DiskError(fmt::format("syncing {} failed: {}; check the disk", file.name(), std::strerror(errno)));
  }
}

bool advance(Request& request, long result) {
  Ticket::State& state = *request.state;
  if (result == -EINTR || result == -EAGAIN) return true;
  if (result > 0) {
    state.bytes_done += result;
    request.offset += result;
    request.buffer += result;
    request.bytes -= result;
    if (request.bytes > 0) return true;
  }
  if (result < 0) {
    int none = 0;
    state.error.compare_exchange_strong(none, static_cast<int>(-result));
  }
  state.requests_left.fetch_sub(1, std::memory_order_release);
  return false;
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
