// Divides the updates of one space between backward and the next forward. The aim is a disk that is never idle while
// the program waits. If the disk is idle in forward and the program waits for it in backward, the last parameters of
// backward are left to the step's program: their gradients stay in memory until forward, which uses these parameters
// first. If the disk is idle in backward and the program waits in forward, backward takes more. A controller moves
// the limit by the smaller of the two times, if two steps agree: in one of them the program may have done other work,
// such as an evaluation.
//
// It decides nothing about correctness. Under the domain's deferral_mutex.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace zeropage {

/// Seconds since any earlier moment: all of them, those in which the program waited for the disk or for memory, and
/// those in which the disk had nothing to do.
struct Moment {
  double now, waited, idle;
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
  // Smaller gains change nothing, because each change is a surprise to the plan.
  static constexpr double kTolerated = 0.04;
  // Parameters are whole. If one of them changes sides again and again, such gains are out of reach. They are
  // tolerated for some time: a hundred steps halve it.
  static constexpr double kMargin = 1.3, kForgets = 0.993;
  // A change that leaves more than this of the gain that it promised, and made the step no faster, is taken back. The
  // rest is out of reach too. If updates are a small part of the disk's work, a change leaves most of the gain.
  static constexpr double kHelped = 0.75, kFaster = 1.0 / 16;
  // Without waits in backward, it slowly takes back what it left.
  static constexpr double kNoWait = 0.005, kBack = 0.01;

  /// Moves the share after a backward and the forward after it, which had the same one.
  void adapt(const Moment& moment) {
    // The step after a change surprises the plan, and other steps than the last one cannot be compared.
    if (std::exchange(has_changed_, false) || !is_like_before_) return void(seen_ = 0);
    const double seconds = moment.now - began_.now;
    const double waits_in_backward = (stepped_.waited - began_.waited) / seconds,
                 waits_in_forward = (moment.waited - stepped_.waited) / seconds,
                 idle_in_backward = (stepped_.idle - began_.idle) / seconds,
                 idle_in_forward = (moment.idle - stepped_.idle) / seconds;
    // Time between a step and the next forward counts as forward. The disk's idle time there is of no use to updates,
    // which forward would wait for as long.
    const double gain_of_leaving = std::min(idle_in_forward, waits_in_backward - waits_in_forward),
                 gain_of_taking = std::min(idle_in_backward, waits_in_forward);
    double gain = std::max(gain_of_leaving, 0.0) - gain_of_taking;
    unavoidable_ *= kForgets;
    if (waits_in_backward < kNoWait && waits_in_forward < kTolerated) share_ = std::min(1.0, share_ + kBack);
    const double before = std::exchange(seen_, gain);
    gain = gain > 0 ? std::clamp(before, 0.0, gain) : std::clamp(before, gain, 0.0);
    if (!(std::abs(gain) > std::max(kTolerated, unavoidable_))) return;
    if ((gain < 0 && share_ == 1) || (gain > 0 && share_ == 0)) return;  // there is nothing left to move
    const bool is_faster = seconds < (1 - kFaster * std::abs(gain_)) * seconds_;
    if (gain * gain_ > 0 && std::abs(gain) > kHelped * std::abs(gain_) && !is_faster) {
      unavoidable_ = kMargin * std::abs(gain);
      gain = -gain_;
    } else if (gain * gain_ < 0 && ++turns_ > 1) {
      unavoidable_ = kMargin * std::min(std::abs(gain), std::abs(gain_));
    }
    gain_ = gain;
    seconds_ = seconds;
    // All updates take the disk at most as long as a step, so a part of them takes at most this part of a step.
    share_ = std::clamp(share_ - gain, 0.0, 1.0);
    has_changed_ = true;
  }

  double share_ = 1;             // The part of the parameters' bytes that backward updates.
  std::size_t total_ = 0;        // Bytes of the parameters in the latest backward with a step.
  std::size_t arrived_ = 0;      // Bytes of those whose last gradient is there.
  std::size_t possible_ = 0;     // Bytes of those that could be updated early.
  bool is_like_before_ = false;  // The latest two backwards had the same parameters, and nearly all were possible.
  bool has_changed_ = true;      // The share has just changed, or nothing ran early before.
  double gain_ = 0;              // The latest gain that led to a change, as a share of a step; of taking: negative.
  double seconds_ = 0;           // of the step that led to it
  double seen_ = 0;              // The gain that the step before promised; 0 after a change.
  double unavoidable_ = 0;       // Gains that are out of reach, likewise.
  int turns_ = 0;                // Changes in the other direction than the one before.
  Moment began_{}, stepped_{};   // The latest backward's begin, and the step after it.
};

}  // namespace zeropage
