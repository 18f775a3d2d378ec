// The queue of a disk: transfers cut into requests of at most IoOptions::block_bytes, in one lane per priority.
// Demanded requests go first. Reads ahead and writes behind take turns and have a limit in flight, so that demanded
// requests meet a short queue. Private to io/; the caller holds a lock of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <span>

#include "zeropage/base/clock.h"
#include "zeropage/base/units.h"
#include "zeropage/io/io.h"

namespace zeropage {

inline constexpr std::size_t kMostDepth = 1024;

struct TransferState {
  TransferState(const Transfer& t, Completion c) : transfer(t), completion(std::move(c)) {}

  /// Runs the completion. Called once, when no request is left.
  void finish();

  Transfer transfer;
  Completion completion;
  std::atomic<std::size_t> requests_left{1};
  std::atomic<std::size_t> bytes_done{0};
  std::atomic<int> error{0};  // errno of the first failed request; 0 with bytes_done short: end of file
};

/// The rest of one request.
struct Request {
  std::shared_ptr<TransferState> state;
  Priority priority;
  std::uint64_t offset;
  std::byte* buffer;
  std::size_t bytes;
};

/// Records the outcome of one system call: `result` bytes, or -errno.
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
  void over(const Request& request);
  /// Queues a popped request again, for its rest.
  void again(Request request);
  void expedite(std::span<const std::byte> memory);
  bool idle() const { return unfinished_ == 0; }
  /// The time until the caller should look again if nothing ends and nothing is added.
  std::chrono::milliseconds look_again() const {
    return std::chrono::milliseconds(lanes_[static_cast<int>(Priority::background)].empty() ? 1000 : 2);
  }
  /// To be called when a transfer's completion has run.
  void finished() { --unfinished_; }

 private:
  std::deque<Request>& lane(Priority priority) { return lanes_[static_cast<int>(priority)]; }

  bool may_start_background();
  void count(const Request& request, int more);

  std::size_t most_, block_;
  std::size_t in_flight_ = 0, background_in_flight_ = 0;  // requests
  std::size_t credit_ = 0;                                // bytes that background requests may still move
  Clock::time_point others_ended_;                        // latest end of a request of another priority
  std::size_t unfinished_ = 0;                            // transfers
  bool write_next_ = false;
  std::deque<Request> lanes_[kPriorities];
};

/// Null if io_uring is not built or not allowed; `why` then tells which.
std::unique_ptr<Io> make_ring(const IoOptions& options, std::string& why);
std::unique_ptr<Io> make_threads(const IoOptions& options);

}  // namespace zeropage
