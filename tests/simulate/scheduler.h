// Runs the threads of a simulation one at a time, in virtual time. They are real threads that pass one baton. A
// seeded choice gives it to a thread that can go on: at each lock, unlock, wait and notification of the pager, and at
// each step of the simulated disk. If none can, the clock advances to the next deadline. If there is none, the
// threads are deadlocked.
//
// A simulation is a process of its own: fail() ends it.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <random>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "zeropage/base/mutex.h"

namespace zeropage::simulate {

using Time = Clock::time_point;
using Duration = Clock::duration;
using Random = std::mt19937_64;

inline std::uint64_t below(Random& random, std::uint64_t end) { return random() % end; }
inline bool one_in(Random& random, std::uint64_t n) { return n > 0 && random() % n == 0; }

/// The outcome of a run. In memory that the parent process shares.
struct Result {
  std::uint64_t seed = 0, events = 0, hash = 0, virtual_us = 0;
  std::uint64_t operations = 0, disk_errors = 0, budget_errors = 0, transfers = 0, faults_injected = 0;
  std::uint64_t long_waits_ended = 0;  // timed waits of a second or more that no notification ended
  std::uint64_t checked_pages = 0, saved_pages = 0, versions = 0;
  std::uint64_t faults = 0, evictions = 0, surprises = 0;  // of the cache
  bool done = false;
  std::array<char, 512> failure{};
};

struct SchedulerOptions {
  std::uint64_t seed = 0;
  std::uint64_t most_events = 400'000;     // a run with more makes no progress
  bool long_waits_fail = false;            // a timed wait of a second or more must be notified
  std::uint64_t dropped_notification = 0;  // the n-th that has waiters is lost; 0: none
  bool is_verbose = false;
};

class Threads final : public Scheduler {
 public:
  Threads(const SchedulerOptions& options, Result& result);
  ~Threads() override;

  /// Runs `body` as the first thread. Returns when all threads have ended.
  void run(std::function<void()> body);

  // For the threads of the simulation:

  int spawn(std::string name, std::function<void()> body);
  void join(int thread);
  /// A scheduling point.
  void yield(char kind = 'y') noexcept;
  void sleep_for(Duration duration);
  /// Waits for unpark(), or until `deadline`.
  void park(std::optional<Time> deadline) noexcept;
  void unpark(int thread) noexcept;
  int self() const;
  /// Describes what the thread is doing, for reports.
  void doing(std::string text);
  /// Called after events at which no thread has a mutex.
  void set_check(std::function<void()> check) { check_ = std::move(check); }
  /// Ends the process. Records the text and prints it, the seed and every thread's place.
  [[noreturn]] void fail(const std::string& text) noexcept;
  Random& random() { return random_; }
  bool is_verbose() const { return options_.is_verbose; }

  void lock(Mutex& mutex) noexcept override;
  void unlocked(Mutex& mutex) noexcept override;
  void tried(Mutex& mutex, bool locked) noexcept override;
  bool wait(Condition& condition, Mutex& mutex, std::optional<Time> deadline) noexcept override;
  void notify(Condition& condition, bool all) noexcept override;
  Time now() const noexcept override { return now_; }

 private:
  enum class State : std::uint8_t { ready, locking, waiting, parked, done };
  enum class Choice : std::uint8_t { uniform, sticky, ranked };
  struct Thread {
    std::string name, doing;
    State state = State::ready;
    std::binary_semaphore go{0};
    Mutex* mutex = nullptr;  // to be locked before it goes on
    Condition* condition = nullptr;
    bool notified = false;
    std::optional<Time> deadline, waits_since;
    std::uint64_t rank = 0;
    std::thread native;
  };

  void event(char kind) noexcept;
  void pass() noexcept;
  int pick() noexcept;
  bool can_go_on(const Thread& thread) const noexcept;
  bool is_free(const Mutex& mutex) const noexcept;
  bool advance() noexcept;
  void body_of(int index, const std::function<void()>& body);
  [[noreturn]] void report() noexcept;
  void print_place() const noexcept;

  const SchedulerOptions options_;
  Result& result_;
  Random random_;
  Choice choice_;
  std::uint64_t stay_ = 0;         // of 16: how often the sticky choice stays
  std::uint64_t spurious_in_ = 0;  // one in so many choices wakes a waiter that was not notified; 0: none
  Time now_{};
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Mutex*> held_;
  std::uint64_t with_waiters_ = 0;  // notifications
  int running_ = 0;
  std::binary_semaphore ended_{0};
  std::function<void()> check_;
  bool checking_ = false;
  int reporting_ = -1;  // the thread that failed
};

}  // namespace zeropage::simulate
