#include "zeropage/comm/link_meter.h"

#include <algorithm>
#include <utility>

namespace zeropage {
namespace {

constexpr std::chrono::duration<double> kWaited{0.001};  // less: it may have arrived before
constexpr std::size_t kLeastBytes = 256 << 10;           // of a sample

}  // namespace

LinkMeter::Transfer LinkMeter::begin(std::size_t bytes, Time::time_point now) { return {bytes, now}; }

/// 0: none is known.
double LinkMeter::rate() const {
  auto rates = rates_;
  const std::size_t known = std::min(samples_, rates.size());
  if (known == 0) return 0;
  const auto upper = rates.begin() + static_cast<std::ptrdiff_t>(known * 9 / 10);
  std::nth_element(rates.begin(), upper, rates.begin() + static_cast<std::ptrdiff_t>(known));
  return *upper;
}

void LinkMeter::end(const Transfer& transfer, std::chrono::duration<double> waited, Time::time_point now) {
  std::lock_guard lock(mutex_);
  received_ += transfer.bytes, unbooked_ += transfer.bytes;
  waited_ += waited.count();
  if (waited >= kWaited) {
    // The link was busy since the last arrival, if this transfer had begun by then.
    const bool follows = transfer.start <= last_arrival_;
    const auto since = follows ? last_arrival_ : transfer.start;
    const std::size_t bytes = follows ? received_ - received_at_last_arrival_ : transfer.bytes;
    const double seconds = std::chrono::duration<double>(now - since).count();
    if (bytes >= kLeastBytes && seconds > 0)
      rates_[samples_++ % rates_.size()] = static_cast<double>(bytes) / seconds;
    last_arrival_ = now, received_at_last_arrival_ = received_;
  }
  const double known = rate();
  if (known > 0) busy_ += static_cast<double>(std::exchange(unbooked_, 0)) / known;
}

LinkMeter::Totals LinkMeter::totals() const {
  std::lock_guard lock(mutex_);
  return {busy_, waited_};
}

}  // namespace zeropage
