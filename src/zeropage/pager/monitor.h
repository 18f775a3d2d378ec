// The lock of one cache and how its threads wait: asleep, with the lock given up, and counted. It knows nothing of
// what it guards. Private to pager/.
//
// Contract: one lock guards all that a cache keeps; it is never held while waiting: a thread that must wait sleeps on
// `changed` and looks again. After close(), and in a forked child, check_usable() throws.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>

#include "zeropage/base/clock.h"
#include "zeropage/base/current_activity.h"
#include "zeropage/base/process.h"
#include "zeropage/base/trace.h"
#include "zeropage/base/waits.h"

namespace zeropage {

/// What a thread waits for: that content arrives; that memory becomes free; all else, such as what other threads
/// hold.
enum class Cause : std::uint8_t { content, memory, other };
inline constexpr int kCauses = 3;

class Monitor {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// `on_left` is called under the lock, after close(), whenever a frame's last pin is dropped or a thread that gave
  /// the lock up comes back. It must not throw.
  explicit Monitor(std::function<void()> on_left) : on_left_(std::move(on_left)) {}
  ~Monitor() {
    // In a forked child threads of the parent seem to wait for ever, and destroying it would wait for them.
    if (in_forked_child()) (void)changed_.release();
  }
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  std::mutex& mutex() const { return mutex_; }
  /// Notified of a page's state, a pin, or memory.
  std::condition_variable& changed() { return *changed_; }
  /// The lock, for what only looks. Throws AccessError in a forked child, where a thread of the parent may hold it.
  [[nodiscard]] Lock look() const {
    check_not_forked();
    return Lock(mutex_);
  }
  /// The thread waits for `changed`, or, in virtual time, until something comes to its end.
  void sleep(Lock& lock);
  /// What came to its end is booked by `book`, under the lock. In virtual time that is on the thread that waits,
  /// which may hold the lock as it waits for a device: then `book` runs later.
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
  /// Changes under the lock; may be asked without it too, where a hint will do.
  bool closed() const { return closed_; }
  /// Under the lock.
  void close() {
    closed_ = true;
    changed_->notify_all();
  }
  /// Where a pin of a closed cache was dropped.
  void left() const { on_left_(); }
  /// Threads that are at work here and have given up the lock.
  int inside() const { return inside_; }
  /// By threads, for transfers.
  double waited_seconds() const { return waited_seconds_[0] + waited_seconds_[1] + waited_seconds_[2]; }
  double waited_seconds(Cause cause) const { return waited_seconds_[static_cast<int>(cause)]; }
  /// Where content comes from, for people: before threads wait.
  void set_source(std::string_view source) { source_ = source; }
  /// Since some moment, without those in which any thread waited: how far a program would be that never waits.
  double worked_seconds() const {
    const auto now = waiting_ > 0 ? waiting_since_ : Clock::now();
    return std::chrono::duration<double>(now.time_since_epoch()).count() - while_any_waited_;
  }

 private:
  friend class Inside;
  friend class Waiting;
  VirtualClock* const planned_ = VirtualClock::current();  // its time, if it was made for a planned run
  mutable std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  const std::uint64_t generation_ = process_generation();
  std::atomic<bool> closed_ = false;
  int inside_ = 0;
  double waited_seconds_[kCauses] = {};  // of all threads
  std::string_view source_ = "disk";
  double while_any_waited_ = 0;  // until all threads last worked
  int waiting_ = 0;              // threads
  Clock::time_point waiting_since_;
  std::function<void()> on_left_;
};

/// A thread waits while it lives. Under the cache's lock at both ends.
class Waiting {
 public:
  Waiting(Monitor& monitor, Cause cause) : monitor_(monitor), cause_(cause), start_(Clock::now()), listed_(name()) {
    if (monitor_.waiting_++ == 0) monitor_.waiting_since_ = start_;
  }
  ~Waiting() {
    const auto now = Clock::now();
    monitor_.waited_seconds_[static_cast<int>(cause_)] += std::chrono::duration<double>(now - start_).count();
    if (Trace::is_on()) record(now);
    if (--monitor_.waiting_ > 0) return;
    monitor_.while_any_waited_ += std::chrono::duration<double>(now - monitor_.waiting_since_).count();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  std::string_view name() const {
    const std::string_view names[kCauses] = {monitor_.source_, "memory", "other threads"};
    return names[static_cast<int>(cause_)];
  }
  void record(Clock::time_point now) const noexcept {
    try {
      Trace::span("wait", name(), start_, now, Trace::arg("operator", CurrentActivity::now("none")));
    } catch (const std::bad_alloc&) {  // an event is lost
    }
  }

  Monitor& monitor_;
  const Cause cause_;
  const Clock::time_point start_;
  const ListedWait listed_;
};

/// Gives the lock up while it lives, whatever is thrown meanwhile.
class Unlocked {
 public:
  explicit Unlocked(Monitor::Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Monitor::Lock& lock_;
};

/// A thread that gives the lock up and comes back: close() leaves it what it uses. Under the lock at both ends.
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
