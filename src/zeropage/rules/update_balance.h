// Divides the updates of one space between backward and the next forward, so that the program waits about equally
// long for the disk in both: then neither has time to spare that the other lacks. The parameters whose gradients come
// first in backward are updated there. The last ones are left to the step's program: their gradients stay in memory
// until the next forward, which uses these parameters first.
//
// It decides nothing about correctness. Under the domain's deferral_mutex.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace zeropage {

/// A moment of the program: seconds on any clock, and those of them in which it waited for the disk or for memory.
struct Moment {
  double now, waited;
};

class UpdateBalance {
 public:
  /// The next gradient of a backward is there. Whether its parameter of so many bytes is updated in backward.
  bool takes(std::size_t bytes, const Moment& moment) {
    if (arrived_ == 0) {
      if (total_ > 0) adapt(moment);
      began_ = moment;
    }
    arrived_ += bytes;
    return total_ == 0 || static_cast<double>(arrived_) <= share_ * static_cast<double>(total_);
  }
  /// The optimizer's step has been called.
  void step(const Moment& moment) {
    if (arrived_ == 0) return;  // another optimizer's step came before
    total_ = std::exchange(arrived_, 0);
    stepped_ = moment;
  }

 private:
  // Moving a share moves up to as large a share of the step's time from one side to the other, so that the difference
  // changes by up to twice the share. Small differences stay, because each change is a surprise to the plan: those
  // under a share of the step, and those under a share of all waits, since the disk is busy as long as both passes
  // wait.
  static constexpr double kGain = 0.6, kTolerated = 0.03, kToleratedOfWaits = 0.3;

  /// A backward and the forward after it are over, both with the same share.
  void adapt(const Moment& moment) {
    const double seconds = moment.now - began_.now;
    const double in_backward = stepped_.waited - began_.waited, in_forward = moment.waited - stepped_.waited;
    const double lead = (in_backward - in_forward) / seconds;
    const double tolerated = std::max(kTolerated, kToleratedOfWaits * (in_backward + in_forward) / seconds);
    if (std::abs(lead) > tolerated) share_ = std::clamp(share_ - kGain * lead, 0.0, 1.0);
  }

  double share_ = 1;                     // of the parameters' bytes, which backward updates
  std::size_t arrived_ = 0, total_ = 0;  // bytes, since the latest step and before it
  Moment began_{}, stepped_{};           // the latest backward
};

}  // namespace zeropage
