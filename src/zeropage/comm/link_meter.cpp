#include "zeropage/comm/link_meter.h"

#include <algorithm>

namespace zeropage {
namespace {

constexpr std::chrono::duration<double> kWaited{0.001};  // less: it may have arrived before
constexpr std::size_t kLeastBytes = 256 << 10;           // of a sample

}  // namespace

LinkMeter::Transfer LinkMeter::begin(std::size_t bytes, Time::time_point now) {
  std::lock_guard lock(mutex_);
  return {bytes, now, received_};
}

void LinkMeter::end(const Transfer& transfer, std::chrono::duration<double> waited, Time::time_point now) {
  std::lock_guard lock(mutex_);
  received_ += transfer.bytes;
  waited_ += waited.count();
  if (waited < kWaited) return;
  // The link was busy since the last arrival, if this transfer had begun by then.
  const bool follows = transfer.start <= last_arrival_;
  const auto since = follows ? last_arrival_ : transfer.start;
  const std::size_t bytes = received_ - (follows ? received_at_last_arrival_ : transfer.received_before);
  const double seconds = std::chrono::duration<double>(now - since).count();
  if (bytes >= kLeastBytes && seconds > 0) rates_[samples_++ % rates_.size()] = static_cast<double>(bytes) / seconds;
  last_arrival_ = now, received_at_last_arrival_ = received_;
}

LinkMeter::Totals LinkMeter::totals() const {
  std::lock_guard lock(mutex_);
  auto rates = rates_;
  const std::size_t known = std::min(samples_, rates.size());
  if (known == 0) return {0, waited_};
  const auto upper = rates.begin() + static_cast<std::ptrdiff_t>(known * 3 / 4);
  std::nth_element(rates.begin(), upper, rates.begin() + static_cast<std::ptrdiff_t>(known));
  return {static_cast<double>(received_) / *upper, waited_};
}

}  // namespace zeropage
