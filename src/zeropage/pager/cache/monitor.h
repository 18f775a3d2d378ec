// The lock of one cache, and the waits of its threads: asleep, without the lock, and counted. It knows nothing of the
// data that it guards. Private to pager/.
//
// Contract: one lock guards all data of a cache, and no thread holds it while waiting. A thread that must wait sleeps
// on `changed` and looks again. After close(), and in a forked child, check_usable() throws.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/clock.h"
#include "zeropage/base/mutex.h"
#include "zeropage/base/process.h"
#include "zeropage/base/trace.h"
#include "zeropage/base/waits.h"

namespace zeropage {

/// The cause of a wait: content to arrive or to get home, memory to become free, a checkpoint to be written, or
/// anything else, such as other threads' pins.
enum class Cause : std::uint8_t { content, memory, checkpoint, other };

class Monitor {
 public:
  using Lock = std::unique_lock<Mutex>;

  /// `on_left` is called under the lock, after close(), whenever a frame's last pin is dropped or a thread comes back
  /// that gave the lock up. It must not throw.
  explicit Monitor(std::function<void()> on_left) : on_left_(std::move(on_left)) {}
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  Mutex& mutex() const { return mutex_; }
  /// Notified when a page's state, a pin or free memory changes.
  Condition& changed() { return changed_; }
  /// The lock, for readers. Throws AccessError in a forked child, where a thread of the parent may hold it.
  [[nodiscard]] Lock look() const {
    check_not_forked();
    return Lock(mutex_);
  }
  /// Waits for `changed` or, in virtual time, until an event ends.
  void sleep(Lock& lock);
  /// Calls `book` under the lock, to record the end of a transfer. In virtual time the calling thread is the one that
  /// waits; it may hold the lock while it waits for a device. Then `book` runs later.
  template <class Book>
  void run_at_end(Book book) {
    Lock lock(mutex_, std::defer_lock);
    if (!planned_) {
      lock.lock();
    } else if (!lock.try_lock()) {
      return planned_->postpone([this, book] { run_at_end(book); });
    }
    book(lock);
  }

  /// Throws AccessError in a forked child and after close().
  void check_usable() const;
  void check_not_forked() const;
  bool in_forked_child() const { return generation_ != process_generation(); }
  /// Changes under the lock; may be read without it as a hint.
  bool closed() const { return closed_; }
  /// Under the lock.
  void close() {
    closed_ = true;
    changed_.notify_all();
  }
  /// To be called when a pin of a closed cache was dropped.
  void left() const { on_left_(); }
  /// Threads inside the cache that have given up the lock.
  int inside() const { return inside_; }
  /// The time of the program's threads: their waits here, and all that others book to it.
  BookedTime& booked() const { return booked_; }
  /// Names the source of content, for reports. To be called before threads wait.
  void set_source(Spent source) { source_ = source; }
  /// Seconds since some moment, minus those in which any thread waited: the clock of a program that never waits.
  double worked_seconds() const {
    const auto now = waiting_ > 0 ? waiting_since_ : Clock::now();
    return std::chrono::duration<double>(now.time_since_epoch()).count() - while_any_waited_;
  }

 private:
  friend class Inside;
  friend class Waiting;
  VirtualClock* const planned_ = VirtualClock::current();  // its clock, if made for a planned run
  mutable Mutex mutex_{Mutex::Holding::measured};
  Condition changed_;
  const std::uint64_t generation_ = process_generation();
  std::atomic<bool> closed_ = false;
  int inside_ = 0;
  mutable BookedTime booked_;
  Spent source_ = Spent::disk;
  double while_any_waited_ = 0;  // seconds in which any thread waited, until all last worked
  int waiting_ = 0;              // threads
  Clock::time_point waiting_since_;
  std::function<void()> on_left_;
};

/// Counts a thread as waiting while it lives, and books its time. Constructed and destroyed under the cache's lock.
class Waiting {
 public:
  Waiting(Monitor& monitor, Cause cause)
      : monitor_(monitor), booking_(&monitor.booked(), spent(cause)), listed_(name_of(spent(cause))) {
    if (monitor_.waiting_++ == 0) monitor_.waiting_since_ = Clock::now();
  }
  ~Waiting() {
    if (--monitor_.waiting_ > 0) return;
    monitor_.while_any_waited_ += std::chrono::duration<double>(Clock::now() - monitor_.waiting_since_).count();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Spent spent(Cause cause) const {
    const Spent causes[] = {monitor_.source_, Spent::memory, Spent::checkpoint, Spent::threads};
    return causes[static_cast<int>(cause)];
  }

  Monitor& monitor_;
  const Booking booking_;
  const ListedWait listed_;
};

/// Gives the lock up while it lives, and takes it back even after an exception.
class Unlocked {
 public:
  explicit Unlocked(Monitor::Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Monitor::Lock& lock_;
};

/// Marks a thread that gives the lock up and comes back: close() keeps the data that it uses. Constructed and
/// destroyed under the lock.
class Inside {
 public:
  explicit Inside(Monitor& monitor) : monitor_(monitor) { ++monitor_.inside_; }
  ~Inside() {
    --monitor_.inside_;
    if (monitor_.closed()) monitor_.left();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Monitor& monitor_;
};

}  // namespace zeropage
