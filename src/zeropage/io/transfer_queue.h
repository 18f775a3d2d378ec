// What waits for a disk: transfers cut into requests of at most IoOptions::block_bytes, in one lane a priority. What
// is demanded goes first; reads ahead and writes behind take turns, and are bounded in flight, so that what is
// demanded meets a short queue. Private to io/; the caller holds a lock of its own.
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

/// A transfer that was started.
struct TransferState {
  TransferState(const Transfer& t, Completion c) : transfer(t), completion(std::move(c)) {}

  /// Runs the completion. Called once, when no request is left.
  void finish();

  Transfer transfer;
  Completion completion;
  std::atomic<std::size_t> requests_left{1};
  std::atomic<std::size_t> bytes_done{0};
  std::atomic<int> error{0};  // errno of the first request that failed; 0 with bytes_done short: end of file
};

/// The rest of one request.
struct Request {
  std::shared_ptr<TransferState> state;
  Priority priority;
  std::uint64_t offset;
  std::byte* buffer;
  std::size_t bytes;
};

/// Books the outcome of one system call: `result` bytes, or -errno.
enum class Advance { again, over, transfer_over };
Advance advance(Request& request, long result);

class TransferQueue {
 public:
  /// `most_in_flight`: requests, of `block_bytes`; of those that no thread waits for, at most half.
  TransferQueue(std::size_t most_in_flight, std::size_t block_bytes) : most_(most_in_flight), block_(block_bytes) {}

  void push(std::shared_ptr<TransferState> state, Priority priority);
  /// The request to start next; none if there is none, or enough is in flight.
  std::optional<Request> pop();
  /// Any request that is queued, whatever is in flight: when nothing is started any more.
  std::optional<Request> drain();
  /// A request that was popped is over.
  void over(const Request& request);
  /// A request that was popped must be started again for its rest.
  void again(Request request);
  void expedite(std::span<const std::byte> memory);
  bool idle() const { return unfinished_ == 0; }
  /// How long to wait before looking again, where nothing ends and nothing new comes.
  std::chrono::milliseconds look_again() const {
    return std::chrono::milliseconds(lanes_[static_cast<int>(Priority::background)].empty() ? 1000 : 2);
  }
  /// A transfer's completion has run.
  void finished() { --unfinished_; }

 private:
  std::deque<Request>& lane(Priority priority) { return lanes_[static_cast<int>(priority)]; }

  bool may_start_background();
  void count(const Request& request, int more);

  std::size_t most_, block_;
  std::size_t in_flight_ = 0, background_in_flight_ = 0;  // requests
  std::size_t credit_ = 0;                                // bytes that may go in the background
  Clock::time_point others_ended_;                        // the latest that did not go there
  std::size_t unfinished_ = 0;                            // transfers
  bool write_next_ = false;
  std::deque<Request> lanes_[kPriorities];
};

/// Null where io_uring is not built or not allowed; `why` then says which.
std::unique_ptr<Io> make_ring(const IoOptions& options, std::string& why);
std::unique_ptr<Io> make_threads(const IoOptions& options);

}  // namespace zeropage
