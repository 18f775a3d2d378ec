// Divides the updates of one space between backward and the next forward, so that the program waits equally long for
// the disk in both: then neither has time to spare that the other lacks. The parameters whose gradients come first in
// backward are updated there. The last ones are left to the step's program: their gradients stay in memory until the
// next forward, which uses these parameters first.
//
// It decides nothing about correctness. Under the domain's deferral_mutex.
#pragma once

#include <algorithm>
#include <cstddef>

namespace zeropage {

/// A moment of the program: seconds on any clock, and those of them in which it waited for the disk or for memory.
struct Moment {
  double now, waited;
};

class UpdateBalance {
 public:
  /// The next gradient of a backward is there. Whether its parameter of so many bytes is updated in backward.
  bool takes(std::size_t bytes, const Moment& moment) {
    if (arrived_ == 0) backward_began_ = moment;
    arrived_ += bytes;
    return total_ == 0 || static_cast<double>(arrived_) <= share_ * static_cast<double>(total_);
  }
  /// The optimizer's step has been called.
  void step(const Moment& moment) {
    if (arrived_ == 0) return;  // another optimizer's step came before
    if (total_ > 0 && moment.now > step_.now) {
      const double in_forward = backward_began_.waited - step_.waited,
                   in_backward = moment.waited - backward_began_.waited;
      const double lead = (in_backward - in_forward) / (moment.now - step_.now);
      if (lead > kTolerated || lead < -kTolerated) share_ = std::clamp(share_ - kGain * lead, 0.0, 1.0);
    }
    total_ = arrived_;
    arrived_ = 0;
    step_ = moment;
  }
  /// The share of the parameters' bytes that backward updates.
  double share() const { return share_; }

 private:
  // Moving a share moves up to as large a share of the step's time from one side to the other, so that the difference
  // changes by up to twice the share. Small differences stay: each change is a surprise to the plan.
  static constexpr double kGain = 0.7, kTolerated = 0.03;

  double share_ = 1;
  std::size_t arrived_ = 0, total_ = 0;  // bytes, since the latest step and before it
  Moment step_{}, backward_began_{};
};

}  // namespace zeropage
