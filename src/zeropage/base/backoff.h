// Exponential backoff for an attempt that failed: skips twice as many occasions each time, until the attempt
// succeeds.
#pragma once

#include <algorithm>

namespace zeropage {

/// Counts in occasions. Not thread-safe.
class Backoff {
 public:
  bool is_over() const { return left_ == 0; }
  /// To be called at each occasion. False: skip this one.
  bool pass() {
    if (left_ == 0) return true;
    --left_;
    return false;
  }
  void hit() { next_ = 1; }
  void missed() {
    left_ = next_;
    next_ = std::min(2 * next_, kLongest);
  }

 private:
  static constexpr int kLongest = 64;
  int left_ = 0, next_ = 1;
};

}  // namespace zeropage
