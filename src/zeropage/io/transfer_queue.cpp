#include "zeropage/io/transfer_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "zeropage/base/errors.h"

namespace zeropage {
namespace {

// [Note: background] Background requests use an idle disk. On a busy disk they get a small share of the others'
// bytes, so that they end in time and slow the others little. Few of them are in flight, so that new requests meet a
// short queue.
constexpr std::size_t kMostBackground = 2;     // requests in flight
constexpr std::size_t kBackgroundShare = 12;   // one byte per this many bytes of others
constexpr std::size_t kMostCredit = 4 * kMiB;  // bytes; at least one request

}  // namespace

std::exception_ptr TransferState::failure() const try {
  const int number = error.load();
  const std::size_t moved = bytes_done.load();
  if (number == 0 && moved == transfer.bytes) return nullptr;
  throw DiskError(
      fmt::format("{} {} at offset {} of {} failed: {}; check the disk",
                  transfer.direction == Direction::read ? "reading" : "writing", format_bytes(transfer.bytes),
                  transfer.offset, transfer.file->name(),
                  number ? std::strerror(number) : fmt::format("only {} were transferred", format_bytes(moved))),
      number ? number : EIO, transfer.file->name());
} catch (...) {  // or std::bad_alloc
  return std::current_exception();
}

void TransferState::finish() {
  // Frees the completion's data before the next wait can return.
  std::exchange(completion, nullptr)(failure());
}

Advance advance(Request& request, long result) {
  TransferState& state = *request.state;
  if (result == -EAGAIN) std::this_thread::sleep_for(kPause);
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
  TransferState& s = *state;
  s.requests_left = std::max<std::size_t>(ceil_div(s.transfer.bytes, block_), 1);
  s.priority_ = priority;
  s.epoch_ = epoch_;
  TransferList one;
  one.push_back(std::move(state));
  s.place_ = one.begin();
  s.by_buffer_ = by_buffer_.emplace(s.transfer.buffer, &s);
  try {
    ++unfinished_[epoch_];
  } catch (...) {
    by_buffer_.erase(s.by_buffer_);
    throw;
  }
  auto& to = lane(priority);
  to.splice(to.end(), one);
}

/// Cuts the next request from the first transfer of a lane. An empty transfer is one request of no bytes.
Request TransferQueue::next_of(TransferList& lane) {
  TransferState& s = *lane.front();
  const Transfer& t = s.transfer;
  Request request{lane.front(), s.priority_, t.offset + s.popped_, t.buffer + s.popped_,
                  std::min(block_, t.bytes - s.popped_)};
  s.popped_ += request.bytes;
  if (s.popped_ == t.bytes) {
    s.queued_ = false;
    lane.pop_front();
  }
  count(request, 1);
  return request;
}

std::optional<Request> TransferQueue::pop() {
  TransferList* from = &lane(Priority::demanded);
  if (in_flight_ >= most_) return std::nullopt;
  if (from->empty()) {
    if (in_flight_ >= std::max<std::size_t>(most_ / 2, 1)) return std::nullopt;
    TransferList &reads = lane(Priority::ahead), &writes = lane(Priority::behind);
    from = writes.empty() || (!write_next_ && !reads.empty()) ? &reads : &writes;
    if (may_start_background()) {
      from = &lane(Priority::background);
    } else if (from->empty()) {
      return std::nullopt;
    } else {
      write_next_ = from == &reads;
    }
  }
  return next_of(*from);
}

/// [Note: background]
bool TransferQueue::may_start_background() {
  const auto& background = lane(Priority::background);
  if (background.empty() || background_in_flight_ >= kMostBackground) return false;
  const bool others_wait = !lane(Priority::ahead).empty() || !lane(Priority::behind).empty();
  const bool is_idle =
      in_flight_ == background_in_flight_ && !others_wait && Clock::now() - others_ended_ >= kUntilIdle;
  if (is_idle) return true;
  const TransferState& next = *background.front();
  const std::size_t bytes = std::min(block_, next.transfer.bytes - next.popped_);
  if (credit_ < bytes) return false;
  credit_ -= bytes;
  return true;
}

std::optional<Request> TransferQueue::drain() {
  for (auto& lane : lanes_) {
    if (!lane.empty()) return next_of(lane);
  }
  return std::nullopt;
}

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

void TransferQueue::expedite(std::span<const std::byte> memory) {
  auto& demanded = lane(Priority::demanded);
  const auto end = by_buffer_.lower_bound(memory.data() + memory.size());
  for (auto at = by_buffer_.lower_bound(memory.data()); at != end; ++at) {
    TransferState& s = *at->second;
    if (!s.queued_ || s.priority_ == Priority::demanded) continue;
    demanded.splice(demanded.end(), lane(s.priority_), s.place_);
    s.priority_ = Priority::demanded;
  }
}

bool TransferQueue::finished(TransferState& state) {
  const auto epoch = unfinished_.find(state.epoch_);
  const bool is_last = --epoch->second == 0;
  if (is_last) unfinished_.erase(epoch);
  by_buffer_.erase(state.by_buffer_);
  return is_last;
}

}  // namespace zeropage
