// A list of waiting threads, with cause and start, so that a watching thread can report a stalled disk or rank. A
// thread may list itself under any lock. The list has a lock of its own. Under it, the watching thread only calls
// CurrentActivity, for the waiting thread's activity.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zeropage/base/clock.h"
#include "zeropage/base/current_activity.h"

namespace zeropage {

/// This thread waits while the object lives. `what` must outlive it: "disk", "memory", "ranks", …
class ListedWait {
 public:
  explicit ListedWait(std::string_view what, std::string_view details = {});
  ~ListedWait();
  ListedWait(const ListedWait&) = delete;
  ListedWait& operator=(const ListedWait&) = delete;

 private:
  friend struct LongWait;
  const std::string_view what_, details_;
  const CurrentActivity* const activity_ = CurrentActivity::innermost();
  const Clock::time_point since_ = Clock::now();
  std::uint64_t number_ = 0;
  ListedWait *before_ = nullptr, *after_ = nullptr;
};

struct LongWait {
  std::uint64_t number;  // of the wait, unique in the process
  std::string what, details, activity;
  double seconds;

  /// Waits that have lasted at least `seconds`. None in a forked child.
  static std::vector<LongWait> under_way(double seconds);
};

}  // namespace zeropage
