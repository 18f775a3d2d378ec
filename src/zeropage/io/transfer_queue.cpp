#include "zeropage/io/transfer_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>

#include "zeropage/base/errors.h"

namespace zeropage {
namespace {

// [Note: background] Background requests use an idle disk. On a busy disk they get a small share of the others'
// bytes, so that they end in time and slow the others little. Few of them are in flight, so that new requests meet a
// short queue.
constexpr std::size_t kMostBackground = 2;                 // requests in flight
constexpr std::size_t kBackgroundShare = 12;               // one byte per this many bytes of others
constexpr std::size_t kMostCredit = 4 * kMiB;              // bytes; at least one request
constexpr auto kUntilIdle = std::chrono::milliseconds(2);  // pauses of a busy disk are shorter

}  // namespace

void TransferState::finish() {
  std::exception_ptr failure;
  const int number = error.load();
  const std::size_t moved = bytes_done.load();
  if (number != 0 || moved != transfer.bytes) {
    failure = std::make_exception_ptr(DiskError(
        fmt::format("{} {} at offset {} of {} failed: {}; check the disk",
                    transfer.direction == Direction::read ? "reading" : "writing", format_bytes(transfer.bytes),
                    transfer.offset, transfer.file->name(),
                    number ? std::strerror(number) : fmt::format("only {} were transferred", format_bytes(moved))),
        number ? number : EIO, transfer.file->name()));
  }
  // Frees the completion's data before the next wait can return.
  std::exchange(completion, nullptr)(std::move(failure));
}

Advance advance(Request& request, long result) {
  TransferState& state = *request.state;
  if (result == -EINTR || result == -EAGAIN) return Advance::again;
  if (result > 0) {
    state.bytes_done += result;
    request.offset += result;
    request.buffer += result;
    request.bytes -= result;
    if (request.bytes > 0) return Advance::again;
  }
  if (result < 0) {
    int none = 0;
    state.error.compare_exchange_strong(none, static_cast<int>(-result));
  }
  return state.requests_left.fetch_sub(1) == 1 ? Advance::transfer_over : Advance::over;
}

void TransferQueue::push(std::shared_ptr<TransferState> state, Priority priority) {
  const Transfer& t = state->transfer;
  auto& requests = lane(priority);
  const std::size_t before = requests.size();
  state->requests_left = std::max<std::size_t>(ceil_div(t.bytes, block_), 1);
  std::size_t at = 0;
  try {
    do {  // an empty transfer is one request of no bytes
      requests.push_back({state, priority, t.offset + at, t.buffer + at, std::min(block_, t.bytes - at)});
      at += block_;
    } while (at < t.bytes);
  } catch (...) {  // all or nothing
    requests.resize(before);
    throw;
  }
  ++unfinished_;
}

std::optional<Request> TransferQueue::pop() {
  std::deque<Request>* from = &lane(Priority::demanded);
  if (in_flight_ >= most_) return std::nullopt;
  if (from->empty()) {
    if (in_flight_ >= std::max<std::size_t>(most_ / 2, 1)) return std::nullopt;
    std::deque<Request>&reads = lane(Priority::ahead), &writes = lane(Priority::behind);
    from = writes.empty() || (!write_next_ && !reads.empty()) ? &reads : &writes;
    if (may_start_background()) {
      from = &lane(Priority::background);
    } else if (from->empty()) {
      return std::nullopt;
    } else {
      write_next_ = from == &reads;
    }
  }
  Request request = std::move(from->front());
  from->pop_front();
  count(request, 1);
  return request;
}

/// [Note: background]
bool TransferQueue::may_start_background() {
  const auto& background = lane(Priority::background);
  if (background.empty() || background_in_flight_ >= kMostBackground) return false;
  const bool others_wait = !lane(Priority::ahead).empty() || !lane(Priority::behind).empty();
  const bool is_idle =
      in_flight_ == background_in_flight_ && !others_wait && Clock::now() - others_ended_ >= kUntilIdle;
  if (is_idle) return true;
  if (credit_ < background.front().bytes) return false;
  credit_ -= background.front().bytes;
  return true;
}

std::optional<Request> TransferQueue::drain() {
  for (auto& lane : lanes_) {
    if (lane.empty()) continue;
    Request request = std::move(lane.front());
    lane.pop_front();
    count(request, 1);
    return request;
  }
  return std::nullopt;
}

void TransferQueue::over(const Request& request) { count(request, -1); }

void TransferQueue::count(const Request& request, int more) {
  in_flight_ += more;
  if (request.priority == Priority::background) {
    background_in_flight_ += more;
  } else if (more > 0) {
    credit_ = std::min(credit_ + request.bytes / kBackgroundShare, std::max(kMostCredit, block_));
  } else {
    others_ended_ = Clock::now();
  }
}

void TransferQueue::again(Request request) {
  count(request, -1);
  lane(request.priority).push_front(std::move(request));
}

void TransferQueue::expedite(std::span<const std::byte> memory) {
  for (const Priority priority : {Priority::ahead, Priority::behind, Priority::background}) {
    auto& from = lane(priority);
    const auto wanted = [&](const Request& request) {
      const std::byte* const buffer = request.state->transfer.buffer;
      return !std::less<>()(buffer, memory.data()) && std::less<>()(buffer, memory.data() + memory.size());
    };
    for (auto request = from.begin(); request != from.end();) {
      if (!wanted(*request)) {
        ++request;
        continue;
      }
      request->priority = Priority::demanded;
      lane(Priority::demanded).push_back(std::move(*request));
      request = from.erase(request);
    }
  }
}

}  // namespace zeropage
