// The queue of a disk: transfers in one lane per priority, cut into requests of at most IoOptions::block_bytes as
// they start. Demanded requests go first. Reads ahead and writes behind take turns and have a limit in flight, so
// that demanded requests meet a short queue. Only push() and begin_epoch() allocate memory. Private to io/; the
// caller holds a lock of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "zeropage/base/clock.h"
#include "zeropage/base/units.h"
#include "zeropage/io/io.h"

namespace zeropage {

inline constexpr std::size_t kMostDepth = 1024;
inline constexpr auto kUntilIdle = std::chrono::milliseconds(2);  // pauses of a busy disk are shorter
inline constexpr auto kPause = std::chrono::milliseconds(1);      // if the system lacks resources

struct TransferState;
using TransferList = std::list<std::shared_ptr<TransferState>>;
using ByBuffer = std::multimap<const std::byte*, TransferState*, std::less<>>;

struct TransferState {
  TransferState(const Transfer& t, Completion c) : transfer(t), completion(std::move(c)) {}

  /// Runs the completion. Called once, when no request is left.
  void finish();

  Transfer transfer;
  Completion completion;
  std::atomic<std::size_t> requests_left{1};
  std::atomic<std::size_t> bytes_done{0};
  std::atomic<int> error{0};            // errno of the first failed request; 0 with bytes_done short: end of file
  std::shared_ptr<TransferState> next;  // for the engine's list

 private:
  friend class TransferQueue;
  std::exception_ptr failure() const;  // null if none

  Priority priority_{};
  bool queued_ = true;      // has requests that were not popped
  std::size_t popped_ = 0;  // bytes
  std::uint64_t epoch_ = 0;
  TransferList::iterator place_;
  ByBuffer::iterator by_buffer_;
};

/// The rest of one request.
struct Request {
  std::shared_ptr<TransferState> state;
  Priority priority;
  std::uint64_t offset;
  std::byte* buffer;
  std::size_t bytes;
};

/// Records the outcome of one system call: `result` bytes, or -errno. `again`: the caller repeats the request, for
/// its rest. Pauses if the system lacks resources for the request.
enum class Advance { again, over, transfer_over };
Advance advance(Request& request, long result);

class TransferQueue {
 public:
  /// `most_in_flight`: requests of `block_bytes`; requests that no thread waits for use at most half.
  TransferQueue(std::size_t most_in_flight, std::size_t block_bytes) : most_(most_in_flight), block_(block_bytes) {}

  void push(std::shared_ptr<TransferState> state, Priority priority);
  /// The request to start next; none if the queue is empty or enough is in flight.
  std::optional<Request> pop();
  /// Any queued request, whatever is in flight: for a queue that starts nothing any more.
  std::optional<Request> drain();
  /// To be called when a popped request is over.
  void over(const Request& request) { count(request, -1); }
  /// Moves the transfers whose buffers begin in `memory` to the end of the demanded lane.
  void expedite(std::span<const std::byte> memory);
  /// To be called when a transfer's completion has run. Returns whether an epoch may have ended.
  bool finished(TransferState& state);

  bool idle() const { return unfinished_.empty(); }
  /// Begins an epoch, and returns the number of the one before.
  std::uint64_t begin_epoch() { return epoch_++; }
  /// Whether all transfers of this epoch and earlier ones are finished.
  bool has_ended(std::uint64_t epoch) const { return idle() || unfinished_.begin()->first > epoch; }

  bool has_queued() const {
    return std::ranges::any_of(lanes_, [](const TransferList& lane) { return !lane.empty(); });
  }
  /// Whether the caller should look again after kUntilIdle, if nothing ends and nothing is added.
  bool has_background() const { return !lanes_[static_cast<int>(Priority::background)].empty(); }

 private:
  TransferList& lane(Priority priority) { return lanes_[static_cast<int>(priority)]; }

  bool may_start_background();
  Request next_of(TransferList& lane);
  void count(const Request& request, int more);

  std::size_t most_, block_;
  std::size_t in_flight_ = 0, background_in_flight_ = 0;  // requests
  std::size_t credit_ = 0;                                // bytes that background requests may still move
  Clock::time_point others_ended_;                        // latest end of a request of another priority
  bool write_next_ = false;
  TransferList lanes_[kPriorities];
  ByBuffer by_buffer_;  // all that are not finished
  std::uint64_t epoch_ = 0;
  std::map<std::uint64_t, std::size_t> unfinished_;  // transfers, by epoch
};

/// Null if io_uring is not built or not allowed; `why` then tells which.
std::unique_ptr<Io> make_ring(const IoOptions& options, std::string& why);
std::unique_ptr<Io> make_threads(const IoOptions& options);

}  // namespace zeropage
