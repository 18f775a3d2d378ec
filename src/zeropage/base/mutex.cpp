#include "zeropage/base/mutex.h"

#include <ctime>

namespace zeropage {

void Holds::note(std::uint64_t nanoseconds) {
  std::uint64_t longest = longest_.load();
  while (longest < nanoseconds && !longest_.compare_exchange_weak(longest, nanoseconds)) {
  }
}

#if ZEROPAGE_MEASURE_HOLDS
namespace {

std::uint64_t thread_nanoseconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace

void Mutex::begin_hold() {
  if (measured_) held_since_ = thread_nanoseconds();
}

void Mutex::end_hold() {
  if (measured_) Holds::note(thread_nanoseconds() - held_since_);
}
#endif

}  // namespace zeropage
