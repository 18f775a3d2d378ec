// Measures how fast a rank receives, and for how long the link was busy with what it received. No torch.
//
// A transfer's arrival is only seen by a thread that waits for it. The rate is therefore measured between arrivals
// that threads waited for, and from the start of a transfer that was alone. It is the ninth decile of the last
// samples, because a rank that is late makes a link look slow.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <mutex>

namespace zeropage {

class LinkMeter {
 public:
  using Time = std::chrono::steady_clock;

  /// A transfer that this rank receives.
  struct Transfer {
    std::size_t bytes = 0;
    Time::time_point start = {};
  };
  Transfer begin(std::size_t bytes, Time::time_point now = Time::now());
  /// `waited`: the seconds for which a thread has just waited for it; short, if it had arrived before.
  void end(const Transfer& transfer, std::chrono::duration<double> waited, Time::time_point now = Time::now());

  struct Totals {
    double busy_seconds = 0;    // of all transfers, at the measured rate. 0: no rate is known
    double waited_seconds = 0;  // of them, those in which a thread waited
  };
  Totals totals() const;

 private:
  mutable std::mutex mutex_;
  double rate() const;

  std::size_t received_ = 0;
  std::size_t unbooked_ = 0;  // of them, those that came before a rate was known
  double busy_ = 0, waited_ = 0;
  Time::time_point last_arrival_ = {};
  std::size_t received_at_last_arrival_ = 0;
  std::array<double, 64> rates_{};  // the last ones, in bytes a second
  std::size_t samples_ = 0;
};

}  // namespace zeropage
