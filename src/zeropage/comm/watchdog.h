// Watches the waits of a rank's threads for other ranks. Free of torch.
//
// [Note: waits in a circle] Ranks gather in one order, and exchange words and sums in one order. How the two orders
// interleave is each rank's own: a bucket of gradients is full at another place where other layers made gradients.
// Rank 0 may then wait for rank 1's words on a bucket before it starts gather k, while rank 1 waits in gather k for
// rank 0's part. A rank that waits for words or sums therefore posts what it waits for, and how many gathers it has
// started. A rank that waits in a later gather, and has not begun what is posted, begins it on another thread: it
// answers. If the posting rank cannot go on after an answer, for example because its backward has ended, the waits
// are a circle, and both ranks get an error within seconds.
//
// Posts go through the group's store, and only after 25 ms of waiting. Ranks that run alike never answer: a rank that
// is behind in gathers has begun no more exchanges than one that is ahead.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace zeropage {

class Watchdog {
 public:
  /// Collectives of one channel begin in one order on all ranks.
  enum class Channel : std::uint8_t { gathers, words, sums };
  /// A board of the group that every rank can write and read.
  class Board {
   public:
    virtual ~Board() = default;
    /// Replaces the last text of any rank.
    virtual void post(const std::string& text) = 0;
    /// The last text; none if there was none.
    virtual std::optional<std::string> read() = 0;
  };
  /// Takes part in exchanges until `has_begun()`. If it throws, no wait of this rank can end: see `give_up`.
  using Answer = std::function<void(const std::function<bool()>& has_begun)>;

  /// `give_up` ends all waits of this rank with an error; it runs on another thread. `why`: what an answer threw;
  /// empty: ranks wait for each other.
  using GiveUp = std::function<void(const std::string& why)>;
  Watchdog(int rank, std::unique_ptr<Board> board, GiveUp give_up);
  /// Waits for an answer under way.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void answer_with(Answer answer);

  /// Counts a collective of this rank that starts now, and returns its number, from 1.
  std::uint64_t begin(Channel channel);

  /// This thread waits for other ranks' part of a collective while the object lives.
  class Waiting {
   public:
    /// `watchdog` may be null.
    Waiting(Watchdog* watchdog, Channel channel, std::uint64_t number);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Watchdog* watchdog_;
    std::uint64_t id_ = 0;
  };
  /// While the object lives, the waits of this thread end with an answer, and its program goes on.
  class GoesOn {
   public:
    GoesOn();
    ~GoesOn();
    GoesOn(const GoesOn&) = delete;
    GoesOn& operator=(const GoesOn&) = delete;
  };

 private:
  struct State;
  std::shared_ptr<State> state_;  // the threads' too
};

}  // namespace zeropage
