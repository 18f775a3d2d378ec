// What both implementations of Io share: a transfer is cut into requests of at most 1 MiB, each of which may complete
// in parts; the ticket is done when all are. Private to io/.
#pragma once

#include <atomic>
#include <memory>

#include "zeropage/base/units.h"
#include "zeropage/io/io.h"

namespace zeropage {

inline constexpr std::size_t kRequestBytes = kMiB;

struct Ticket::State {
  explicit State(const Transfer& t) : transfer(t), requests_left(ceil_div(t.bytes, kRequestBytes)) {}

  Transfer transfer;
  std::atomic<std::size_t> requests_left;
  std::atomic<std::size_t> bytes_done{0};
  std::atomic<int> error{0};  // errno of the first request that failed; 0 with bytes_done short: end of file
};

/// The rest of one request.
struct Request {
  std::shared_ptr<Ticket::State> state;
  std::uint64_t offset;
  std::byte* buffer;
  std::size_t bytes;
};

template <class Add>
void cut_into_requests(const std::shared_ptr<Ticket::State>& state, Add&& add) {
  const Transfer& t = state->transfer;
  for (std::size_t at = 0; at < t.bytes; at += kRequestBytes) {
    add(Request{state, t.offset + at, t.buffer + at, std::min(kRequestBytes, t.bytes - at)});
  }
}

/// Books the outcome of one system call: `result` bytes, or -errno. True if the request must be submitted again for
/// its rest (or was interrupted); false if it is over, in which case the state's count has gone down.
bool advance(Request& request, long result);

/// Null where io_uring is not built or not allowed; `why` then says which.
std::unique_ptr<Io> make_ring(std::string& why);
std::unique_ptr<Io> make_threads();

}  // namespace zeropage
