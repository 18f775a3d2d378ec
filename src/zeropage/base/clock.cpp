#include "zeropage/base/clock.h"

#include <algorithm>
#include <utility>

#include "zeropage/base/mutex.h"

namespace zeropage {

thread_local VirtualClock* VirtualClock::current_ = nullptr;

Clock::time_point Clock::now() noexcept {
  if (const VirtualClock* const planned = VirtualClock::current()) return planned->now();
  if (const Scheduler* const scheduler = Scheduler::current()) return scheduler->now();
  return std::chrono::steady_clock::now();
}

void VirtualClock::at(Time when, std::function<void()> event) {
  events_.push({std::max(when, now_), asked_for_++, std::move(event)});
}

bool VirtualClock::run_postponed() {
  const auto postponed = std::exchange(postponed_, {});
  for (const auto& event : postponed) event();
  return !postponed.empty() && postponed_.size() < postponed.size();
}

bool VirtualClock::run_next() {
  if (run_postponed()) return true;
  if (events_.empty()) return false;
  advance_to(events_.top().when);
  return true;
}

void VirtualClock::advance_to(Time when) {
  run_postponed();
  when = std::max(when, after(now_, std::exchange(owed_, 0)));
  while (!events_.empty() && events_.top().when <= when) {
    Event next = std::move(const_cast<Event&>(events_.top()));  // popped before it runs
    events_.pop();
    now_ = std::max(now_, next.when);
    next.run();
  }
  now_ = std::max(now_, when);
}

void VirtualClock::advance(double seconds) { advance_to(after(now_, seconds + std::exchange(owed_, 0))); }

}  // namespace zeropage
