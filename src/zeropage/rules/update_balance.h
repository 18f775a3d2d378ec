// Divides the updates of one space between backward and the next forward. If the disk has more to do in backward than
// the program hides, and forward has time to spare, the last parameters of backward are left to the step's program:
// their gradients stay in memory until forward, which uses these parameters first. A controller moves the limit by
// the waits for the disk in both passes.
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
  /// Whether backward updates the parameter of so many bytes whose last gradient is there. `may`: it can. `now`
  /// returns the present Moment; it is called once in a backward.
  template <class Now>
  bool takes(std::size_t bytes, bool may, Now now) {
    if (arrived_ == 0) {
      const Moment moment = now();
      adapt(moment);
      began_ = moment;
      possible_ = 0;
    }
    arrived_ += bytes;
    if (!may) return false;
    possible_ += bytes;
    return share_ == 1 || total_ == 0 || static_cast<double>(arrived_) <= share_ * static_cast<double>(total_);
  }
  /// To be called for each parameter of an optimizer's step. `now`: as above.
  template <class Now>
  void step(Now now) {
    if (arrived_ == 0) return;  // It was called for another parameter.
    is_like_before_ = arrived_ == total_ && possible_ >= arrived_ - arrived_ / 8;
    total_ = std::exchange(arrived_, 0);
    stepped_ = now();
  }

 private:
  // Moving a share moves up to as large a share of the step's time from one side to the other. The difference then
  // changes by up to twice the share. Small differences stay, because each change is a surprise to the plan.
  // Differences up to a share of all waits stay too: the disk is busy while both passes wait, and a gradient that
  // waits for forward may cost a write and a read.
  static constexpr double kGain = 0.6, kTolerated = 0.03, kToleratedOfWaits = 0.5;
  // Parameters are whole. If one of them turns the difference round again and again, such differences are
  // unavoidable. They are tolerated for some time: a hundred steps halve it.
  static constexpr double kMargin = 1.3, kForgets = 0.993;
  // Without waits in backward, it slowly takes back what it left.
  static constexpr double kNoWait = 0.005, kBack = 0.01;

  /// Moves the share after a backward and the forward after it, which had the same one.
  void adapt(const Moment& moment) {
    // The step after a change surprises the plan, and other steps than the last one cannot be compared.
    if (std::exchange(has_changed_, false) || !is_like_before_) return;
    const double seconds = moment.now - began_.now;
    const double in_backward = (stepped_.waited - began_.waited) / seconds,
                 in_forward = (moment.waited - stepped_.waited) / seconds, lead = in_backward - in_forward;
    unavoidable_ *= kForgets;
    if (in_backward < kNoWait && in_forward < kTolerated) share_ = std::min(1.0, share_ + kBack);
    if (!(std::abs(lead) > std::max({kTolerated, kToleratedOfWaits * (in_backward + in_forward), unavoidable_})))
      return;
    if (lead * lead_ < 0 && ++turns_ > 1) unavoidable_ = kMargin * std::min(std::abs(lead), std::abs(lead_));
    lead_ = lead;
    share_ = std::clamp(share_ - kGain * lead, 0.0, 1.0);
    has_changed_ = true;
  }

  double share_ = 1;             // The part of the parameters' bytes that backward updates.
  std::size_t total_ = 0;        // Bytes of the parameters in the latest backward with a step.
  std::size_t arrived_ = 0;      // Bytes of those whose last gradient is there.
  std::size_t possible_ = 0;     // Bytes of those that could be updated early.
  bool is_like_before_ = false;  // The latest two backwards had the same parameters, and nearly all were possible.
  bool has_changed_ = true;      // The share has just changed, or nothing ran early before.
  double lead_ = 0;              // The latest difference that led to a change, as a share of a step.
  double unavoidable_ = 0;       // Differences that are tolerated, likewise.
  int turns_ = 0;                // Changes in the other direction than the one before.
  Moment began_{}, stepped_{};   // The latest backward's begin, and the step after it.
};

}  // namespace zeropage
