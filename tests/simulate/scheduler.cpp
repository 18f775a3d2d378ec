#include "simulate/scheduler.h"

#include <cxxabi.h>
#include <execinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace zeropage::simulate {
namespace {

thread_local int this_thread = -1;

constexpr Duration kEventTakes = std::chrono::microseconds(1);
constexpr Duration kLongWait = std::chrono::seconds(1);

}  // namespace

Threads::Threads(const SchedulerOptions& options, Result& result)
    : options_(options), result_(result), random_(options.seed * 2 + 1) {
  const std::uint64_t kind = below(random_, 4);
  choice_ = kind == 0 ? Choice::uniform : kind == 1 ? Choice::ranked : Choice::sticky;
  stay_ = 4 + below(random_, 12);
  spurious_in_ = one_in(random_, 8) ? 64 : 0;
}

Threads::~Threads() = default;

void Threads::run(std::function<void()> body) {
  const int first = spawn("main", std::move(body));
  running_ = first;
  threads_[static_cast<std::size_t>(first)]->go.release();
  ended_.acquire();
  for (const auto& thread : threads_) thread->native.join();
}

int Threads::spawn(std::string name, std::function<void()> body) {
  const int index = static_cast<int>(threads_.size());
  auto& thread = *threads_.emplace_back(std::make_unique<Thread>());
  thread.name = std::move(name);
  thread.rank = random_();
  thread.native = std::thread([this, index, body = std::move(body)] { body_of(index, body); });
  if (this_thread >= 0) yield('s');
  return index;
}

void Threads::body_of(int index, const std::function<void()>& body) {
  this_thread = index;
  Thread& me = *threads_[static_cast<std::size_t>(index)];
  me.go.acquire();
  if (reporting_ >= 0) report();
  {
    const Entered entered(*this);
    try {
      body();
    } catch (const std::exception& error) {
      fail(std::string("an exception left a thread: ") + error.what());
    }
  }
  me.state = State::done;
  for (const auto& other : threads_) {
    if (other->state == State::parked) other->state = State::ready;  // those that join it
  }
  event('e');
  if (std::ranges::all_of(threads_, [](const auto& thread) { return thread->state == State::done; })) {
    ended_.release();
    return;
  }
  running_ = pick();
  threads_[static_cast<std::size_t>(running_)]->go.release();
}

void Threads::join(int thread) {
  while (threads_[static_cast<std::size_t>(thread)]->state != State::done) park(std::nullopt);
}

int Threads::self() const { return this_thread; }

void Threads::doing(std::string text) {
  if (options_.is_verbose) {
    std::fprintf(stderr, "%8llu %s: %s\n", static_cast<unsigned long long>(result_.events),
                 threads_[static_cast<std::size_t>(this_thread)]->name.c_str(), text.c_str());
  }
  threads_[static_cast<std::size_t>(this_thread)]->doing = std::move(text);
}

/// Counts an event, and checks what must hold after each.
void Threads::event(char kind) noexcept {
  ++result_.events;
  now_ += kEventTakes;
  result_.hash = (result_.hash ^ static_cast<std::uint64_t>(this_thread * 256 + kind)) * 0x100000001B3;
  if (check_ && held_.empty()) {
    checking_ = true;
    check_();
    checking_ = false;
  }
  if (result_.events > options_.most_events) fail("no progress: too many events");
}

bool Threads::is_free(const Mutex& mutex) const noexcept { return std::ranges::find(held_, &mutex) == held_.end(); }

bool Threads::can_go_on(const Thread& thread) const noexcept {
  const bool is_due = thread.deadline && *thread.deadline <= now_;
  switch (thread.state) {
    case State::ready:
      return true;
    case State::locking:
      return is_free(*thread.mutex);
    case State::waiting:
      return (thread.notified || is_due) && is_free(*thread.mutex);
    case State::parked:
      return is_due;
    case State::done:
      break;
  }
  return false;
}

int Threads::pick() noexcept {
  std::vector<int> able;
  do {
    for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
      const Thread& thread = *threads_[static_cast<std::size_t>(i)];
      const bool spurious = spurious_in_ > 0 && thread.state == State::waiting && is_free(*thread.mutex) &&
                            one_in(random_, spurious_in_);
      if (spurious || can_go_on(thread)) able.push_back(i);
    }
  } while (able.empty() && advance());
  if (able.empty()) fail("deadlock: every thread waits, and nothing is under way");
  if (choice_ == Choice::ranked) {
    const auto rank = [&](int i) { return threads_[static_cast<std::size_t>(i)]->rank; };
    const int best = std::ranges::max(able, {}, rank);
    if (one_in(random_, 40)) threads_[static_cast<std::size_t>(best)]->rank = random_();
    return best;
  }
  if (choice_ == Choice::sticky && below(random_, 16) < stay_ && std::ranges::find(able, running_) != able.end()) {
    return running_;
  }
  return able[below(random_, able.size())];
}

/// Advances the clock to the next deadline. False if there is none.
bool Threads::advance() noexcept {
  std::optional<Time> next;
  for (const auto& thread : threads_) {
    if (thread->state == State::waiting || thread->state == State::parked) {
      if (thread->deadline && (!next || *thread->deadline < *next)) next = thread->deadline;
    }
  }
  if (!next || *next <= now_) return false;
  now_ = *next;
  return true;
}

/// Gives the baton to the thread that is chosen, perhaps this one, and returns when it is this thread's turn.
void Threads::pass() noexcept {
  const int next = pick();
  Thread& me = *threads_[static_cast<std::size_t>(this_thread)];
  if (next != this_thread) {
    running_ = next;
    threads_[static_cast<std::size_t>(next)]->go.release();
    me.go.acquire();
    if (reporting_ >= 0) report();
  }
  if (me.state == State::locking || me.state == State::waiting) {
    held_.push_back(me.mutex);
    if (!me.mutex->native().try_lock()) fail("a mutex that no thread of the simulation has is locked");
  }
  me.state = State::ready;
}

void Threads::yield(char kind) noexcept {
  if (checking_) return;
  event(kind);
  pass();
}

void Threads::sleep_for(Duration duration) {
  const Time until = now_ + duration;
  while (now_ < until) park(until);
}

void Threads::park(std::optional<Time> deadline) noexcept {
  Thread& me = *threads_[static_cast<std::size_t>(this_thread)];
  event('p');
  me.state = State::parked;
  me.deadline = deadline;
  pass();
  me.deadline.reset();
}

void Threads::unpark(int thread) noexcept {
  Thread& other = *threads_[static_cast<std::size_t>(thread)];
  if (other.state == State::parked) other.state = State::ready;
}

void Threads::lock(Mutex& mutex) noexcept {
  if (checking_) return mutex.native().lock();
  event('l');
  Thread& me = *threads_[static_cast<std::size_t>(this_thread)];
  me.state = State::locking;
  me.mutex = &mutex;
  pass();
}

void Threads::unlocked(Mutex& mutex) noexcept {
  if (checking_) return;
  std::erase(held_, &mutex);
  yield('u');
}

void Threads::tried(Mutex& mutex, bool locked) noexcept {
  if (checking_) return;
  if (locked) held_.push_back(&mutex);
  yield('t');
}

bool Threads::wait(Condition& condition, Mutex& mutex, std::optional<Time> deadline) noexcept {
  Thread& me = *threads_[static_cast<std::size_t>(this_thread)];
  me.condition = &condition;
  me.notified = false;
  me.mutex = &mutex;
  me.deadline = deadline;
  me.waits_since = now_;
  std::erase(held_, &mutex);
  mutex.native().unlock();
  me.state = State::waiting;
  event('w');
  pass();
  const bool in_time = me.notified || !deadline || now_ < *deadline;
  if (!in_time && *deadline - *me.waits_since >= kLongWait) {
    ++result_.long_waits_ended;
    if (options_.long_waits_fail) fail("a long timed wait came to its end without a notification");
  }
  me.condition = nullptr;
  me.deadline.reset();
  return in_time;
}

void Threads::notify(Condition& condition, bool all) noexcept {
  if (checking_) return;
  const auto waits = [&](const auto& thread) {
    return thread->state == State::waiting && thread->condition == &condition && !thread->notified;
  };
  const bool has_waiters = std::ranges::any_of(threads_, waits);
  const bool is_lost = has_waiters && ++with_waiters_ == options_.dropped_notification;
  for (const auto& thread : threads_) {
    if (is_lost || !waits(thread)) continue;
    thread->notified = true;
    if (!all) break;
  }
  yield('n');
}

void Threads::fail(const std::string& text) noexcept {
  if (reporting_ >= 0) ::_exit(1);
  reporting_ = this_thread;
  std::snprintf(result_.failure.data(), result_.failure.size(), "%s", text.c_str());
  std::fprintf(stderr, "seed %llu failed at event %llu, %.6f s: %s\n", static_cast<unsigned long long>(result_.seed),
               static_cast<unsigned long long>(result_.events),
               std::chrono::duration<double>(now_.time_since_epoch()).count(), text.c_str());
  report();
}

/// Prints this thread's place and lets the next one print its own. The last ends the process.
void Threads::report() noexcept {
  print_place();
  Thread& me = *threads_[static_cast<std::size_t>(this_thread)];
  me.state = State::done;
  for (const auto& thread : threads_) {
    if (thread->state == State::done) continue;
    thread->go.release();
    while (true) me.go.acquire();
  }
  std::fflush(stderr);
  ::_exit(1);
}

void Threads::print_place() const noexcept {
  const Thread& me = *threads_[static_cast<std::size_t>(this_thread)];
  constexpr const char* kStates[] = {"ready", "locking", "waiting", "parked", "done"};
  std::fprintf(stderr, "  %s is %s%s, doing: %s\n", me.name.c_str(), kStates[static_cast<int>(me.state)],
               me.state == State::waiting && me.deadline ? " with a deadline" : "", me.doing.c_str());
  std::array<void*, 40> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  char** const lines = ::backtrace_symbols(frames.data(), count);
  for (int i = 0; lines && i < count; ++i) {
    const std::string line = lines[i];
    const auto begin = line.find('('), end = line.find('+');
    if (begin == std::string::npos || end == std::string::npos || end <= begin + 1) continue;
    int status = 0;
    char* const name =
        abi::__cxa_demangle(line.substr(begin + 1, end - begin - 1).c_str(), nullptr, nullptr, &status);
    const bool is_own = name && std::strstr(name, "simulate::Threads::");
    const bool is_ours = name && std::strncmp(name, "zeropage::", 10) == 0;
    if (is_ours && !is_own) std::fprintf(stderr, "      %.100s\n", name);
    std::free(name);
  }
  std::free(static_cast<void*>(lines));
}

}  // namespace zeropage::simulate
