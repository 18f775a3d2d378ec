// How long something is left alone that was done in vain: twice as long each time, until it is of use again.
#pragma once

#include <algorithm>

namespace zeropage {

/// Counted in occasions to do it. Not thread-safe.
class Backoff {
 public:
  bool is_over() const { return left_ == 0; }
  /// An occasion passes. False: it is not to be taken.
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
