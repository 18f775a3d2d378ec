// The time that waits, rates and timelines are counted in: the system's steady clock, or, on a thread that plans, a
// virtual one, in which a run of hours takes as long as its decisions do.
//
// [Note: virtual time] A plan runs on one thread. Nothing happens beside it: what a modelled disk, link or group of
// ranks will have done is an event, and runs on this thread when the clock reaches it: when the thread computes
// (advance), or when it waits (run_next). So the same decisions are made, in the same order, at each run of a plan.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace zeropage {

class VirtualClock;

/// A clock as std::chrono has them.
struct Clock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::steady_clock::time_point;
  static constexpr bool is_steady = true;
  static time_point now() noexcept;
};

/// Of one thread.
class VirtualClock {
 public:
  using Time = Clock::time_point;

  Time now() const { return now_; }
  /// `event` runs when the clock reaches `when`, or now if that is past. Events of one time run in the order in which
  /// they were asked for. The caller may hold locks; when the event runs, none is held.
  void at(Time when, std::function<void()> event);
  /// The thread computes for so long: what comes due meanwhile runs. The caller holds no lock.
  void advance(double seconds);
  /// The thread waits until the next event, which runs. False if there is none. The caller holds no lock.
  bool run_next();
  /// The thread waits until then.
  void advance_to(Time when);
  /// The thread computes for so long, under a lock: what comes due meanwhile runs when it next computes or waits.
  void owe(double seconds) { owed_ += seconds; }
  /// `event` needs what this thread holds as it waits: it runs when the thread next computes or waits.
  void postpone(std::function<void()> event) { postponed_.push_back(std::move(event)); }

  /// Of this thread; null where time is real.
  static VirtualClock* current() { return current_; }

  /// This thread's time is `clock`'s while it lives.
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
