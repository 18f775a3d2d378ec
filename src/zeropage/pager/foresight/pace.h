// The read rate of a busy home; recent reads count most. If the home writes as much at the same time, this is half of
// its rate for reads alone. The next reads will meet the same mix. It also counts the seconds in which the home has
// anything to do.
//
// Under the cache's lock.
#pragma once

#include <chrono>
#include <utility>

#include "zeropage/base/clock.h"
#include "zeropage/base/units.h"

namespace zeropage {

class Pace {
 public:
  void begin_read(std::size_t bytes) {
    count(0);
    under_way_ += bytes, reading_ += bytes;
  }
  void begin_write(std::size_t bytes) {
    count(0);
    under_way_ += bytes;
  }
  void end_read(std::size_t bytes) {
    count(bytes);
    under_way_ -= bytes, reading_ -= bytes;
  }
  void end_write(std::size_t bytes) {
    count(0);
    under_way_ -= bytes;
  }
  /// Seconds with a transfer in flight, so far.
  double busy_seconds() {
    count(0);
    return busy_seconds_;
  }
  /// Bytes a second; 0 if unknown.
  double read_rate() const { return seconds_ > 0 ? read_ / seconds_ : 0; }

 private:
  static constexpr std::size_t kEnough = 16 * kMiB;  // bytes in flight that keep a disk busy
  static constexpr double kRemembered = 256 * kMiB;

  /// Counts the time since the last call, in which `read` bytes arrived.
  void count(std::size_t read) {
    const auto now = Clock::now();
    const double since = std::chrono::duration<double>(now - std::exchange(counted_until_, now)).count();
    if (under_way_ > 0) busy_seconds_ += since;
    if (under_way_ < kEnough || reading_ == 0) return;
    seconds_ += since;
    read_ += static_cast<double>(read);
    if (read_ > kRemembered) read_ /= 2, seconds_ /= 2;
  }

  std::size_t under_way_ = 0, reading_ = 0;  // bytes in flight; the part that is read
  Clock::time_point counted_until_;
  double read_ = 0, seconds_ = 0;
  double busy_seconds_ = 0;
};

}  // namespace zeropage
