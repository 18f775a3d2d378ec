// A mutex and a condition variable that a simulation can take over. On ordinary threads they are those of the
// standard library, and cost one load of a thread-local pointer more. On the threads of a simulation, each call goes
// to the simulation's Scheduler, which decides the thread that goes on (tests/simulate).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "zeropage/base/clock.h"
#include "zeropage/base/process.h"

namespace zeropage {

class Mutex;
class Condition;

/// Runs the threads of a simulation one at a time. None of its functions throws. Each is called on a thread of the
/// simulation, and each except now() may let other threads run before it returns.
class Scheduler {
 public:
  using Time = Clock::time_point;

  virtual ~Scheduler() = default;
  /// Returns when the calling thread has locked mutex.native().
  virtual void lock(Mutex& mutex) noexcept = 0;
  /// Called when the thread has unlocked mutex.native(), or has tried to lock it without waiting.
  virtual void unlocked(Mutex& mutex) noexcept = 0;
  virtual void tried(Mutex& mutex, bool locked) noexcept = 0;
  /// Unlocks `mutex`, waits for a notification or until `deadline`, and locks it again. False if the deadline came.
  virtual bool wait(Condition& condition, Mutex& mutex, std::optional<Time> deadline) noexcept = 0;
  virtual void notify(Condition& condition, bool all) noexcept = 0;
  virtual Time now() const noexcept = 0;

  /// This thread's scheduler; null outside simulations.
  static Scheduler* current() { return current_; }

  /// Makes `scheduler` this thread's scheduler while it lives.
  class Entered {
   public:
    explicit Entered(Scheduler& scheduler) : outer_(std::exchange(current_, &scheduler)) {}
    ~Entered() { current_ = outer_; }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    Scheduler* outer_;
  };

 private:
  inline static thread_local Scheduler* current_ = nullptr;
};

/// The longest time that a thread computed while it held one of some mutexes. Only builds with
/// ZEROPAGE_MEASURE_HOLDS=1 measure it.
class Holds {
 public:
  /// Nanoseconds of CPU time of the holding thread, since the latest reset.
  static std::uint64_t longest() { return longest_; }
  static void reset() { longest_ = 0; }

 private:
  friend class Mutex;
  static void note(std::uint64_t nanoseconds);
  inline static std::atomic<std::uint64_t> longest_ = 0;
};

class Mutex {
 public:
  Mutex() = default;
  /// `measured`: Holds counts the times for which it is held.
  enum class Holding : bool { unmeasured, measured };
#if ZEROPAGE_MEASURE_HOLDS
  explicit Mutex(Holding holding) : measured_(holding == Holding::measured) {}
#else
  explicit Mutex(Holding) {}
#endif
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() {
    if (Scheduler* const scheduler = Scheduler::current()) [[unlikely]] {
      scheduler->lock(*this);
    } else {
      native_.lock();
    }
    begin_hold();
  }
  bool try_lock() {
    const bool locked = native_.try_lock();
    if (locked) begin_hold();
    if (Scheduler* const scheduler = Scheduler::current()) [[unlikely]]
      scheduler->tried(*this, locked);
    return locked;
  }
  void unlock() {
    end_hold();
    native_.unlock();
    if (Scheduler* const scheduler = Scheduler::current()) [[unlikely]]
      scheduler->unlocked(*this);
  }

  std::mutex& native() { return native_; }

 private:
  friend class Condition;
#if ZEROPAGE_MEASURE_HOLDS
  void begin_hold();
  void end_hold();
  const bool measured_ = false;
  std::uint64_t held_since_ = 0;
#else
  void begin_hold() {}
  void end_hold() {}
#endif
  std::mutex native_;
};

/// In a forked child, the parent's waiting threads seem to wait forever. The destructor does not wait for them.
class Condition {
 public:
  using Lock = std::unique_lock<Mutex>;

  Condition() : native_() {}
  ~Condition() {
    if (generation_ == process_generation()) native_.~condition_variable();
  }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  void wait(Lock& lock) { wait_once(*lock.mutex(), std::nullopt); }
  template <class Predicate>
  void wait(Lock& lock, Predicate is_done) {
    while (!is_done()) wait(lock);
  }
  /// Waits once. False if the deadline came.
  bool wait_until(Lock& lock, Clock::time_point deadline) { return wait_once(*lock.mutex(), deadline); }
  /// False if `is_done` was still false at the deadline.
  template <class Predicate>
  bool wait_until(Lock& lock, Clock::time_point deadline, Predicate is_done) {
    while (!is_done()) {
      if (!wait_once(*lock.mutex(), deadline)) return is_done();
    }
    return true;
  }

  void notify_all() noexcept { notify(/*all=*/true); }
  void notify_one() noexcept { notify(/*all=*/false); }

 private:
  bool wait_once(Mutex& mutex, std::optional<Clock::time_point> deadline) {
    mutex.end_hold();
    bool in_time = true;
    if (Scheduler* const scheduler = Scheduler::current()) [[unlikely]] {
      in_time = scheduler->wait(*this, mutex, deadline);
    } else {
      std::unique_lock native(mutex.native_, std::adopt_lock);
      if (deadline) {
        in_time = native_.wait_until(native, *deadline) == std::cv_status::no_timeout;
      } else {
        native_.wait(native);
      }
      native.release();
    }
    mutex.begin_hold();
    return in_time;
  }
  void notify(bool all) noexcept {
    if (Scheduler* const scheduler = Scheduler::current()) [[unlikely]]
      return scheduler->notify(*this, all);
    all ? native_.notify_all() : native_.notify_one();
  }

  const std::uint64_t generation_ = process_generation();
  union {
    std::condition_variable native_;
  };
};

}  // namespace zeropage
