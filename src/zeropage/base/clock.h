// The clock of waits, rates and timelines: the system's steady clock or, on a thread that plans, a virtual one. Hours
// of virtual time pass as fast as the plan's decisions are made. On a simulation's threads it is their scheduler's
// (base/mutex.h).
//
// [Note: virtual time] A plan runs on one thread, and nothing runs concurrently. The end of work by a modelled disk,
// link or group of ranks is an event. It runs on this thread when the clock reaches it: when the thread computes
// (advance), or when it waits (run_next). Every run of a plan therefore makes the same decisions in the same order.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace zeropage {

class VirtualClock;

/// A std::chrono clock.
struct Clock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::steady_clock::time_point;
  static constexpr bool is_steady = true;
  static time_point now() noexcept;
};

/// The virtual clock of one thread.
class VirtualClock {
 public:
  using Time = Clock::time_point;

  Time now() const { return now_; }
  /// Runs `event` when the clock reaches `when`, or now if that is past. Events at one time run in the order of these
  /// calls. The caller may hold locks; when the event runs, none is held.
  void at(Time when, std::function<void()> event);
  /// The thread computes for `seconds`; events that come due meanwhile run. The caller holds no lock.
  void advance(double seconds);
  /// Waits until the next event, and runs it. False if there is none. The caller holds no lock.
  bool run_next();
  /// Waits until `when`.
  void advance_to(Time when);
  /// The thread computes for `seconds`, under a lock: events that come due run when it next computes or waits.
  void owe(double seconds) { owed_ += seconds; }
  /// Runs `event`, which needs a lock that this thread holds as it waits, when the thread next computes or waits.
  void postpone(std::function<void()> event) { postponed_.push_back(std::move(event)); }

  /// This thread's clock; null if time is real.
  static VirtualClock* current() { return current_; }

  /// Makes `clock` this thread's clock while it lives.
  class Entered {
   public:
    explicit Entered(VirtualClock& clock) : outer_(std::exchange(current_, &clock)) {}
    ~Entered() { current_ = outer_; }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    VirtualClock* outer_;
  };

  static Time after(Time from, double seconds) {
    return from + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

 private:
  struct Event {
    Time when;
    std::uint64_t number;
    std::function<void()> run;
    bool operator<(const Event& other) const {  // std::priority_queue gives the largest first
      return when != other.when ? when > other.when : number > other.number;
    }
  };

  bool run_postponed();

  static thread_local VirtualClock* current_;
  Time now_{};
  std::uint64_t asked_for_ = 0;
  std::priority_queue<Event> events_;
  double owed_ = 0;
  std::vector<std::function<void()>> postponed_;
};

}  // namespace zeropage
