#include "zeropage/kernels/squares.h"

#include <algorithm>

#include "zeropage/kernels/update.h"

namespace zeropage::kernels {
namespace {

constexpr std::size_t kLanes = 8;

/// Value i goes to lane i % kLanes.
[[gnu::always_inline]] inline void add_in_lanes(double* __restrict lanes, const float* __restrict values,
                                                std::size_t count) {
  double sums[kLanes];
  std::copy_n(lanes, kLanes, sums);
  const std::size_t whole = count / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) {
      const double value = values[i + j];
      sums[j] += value * value;
    }
  }
  for (std::size_t i = whole; i < count; ++i) {
    const double value = values[i];
    sums[i % kLanes] += value * value;
  }
  std::copy_n(sums, kLanes, lanes);
}

void add_baseline(double* lanes, const float* values, std::size_t count) { add_in_lanes(lanes, values, count); }

#if defined(__x86_64__)
[[gnu::target("avx2")]] void add_avx2(double* lanes, const float* values, std::size_t count) {
  add_in_lanes(lanes, values, count);
}
const bool has_avx2 = __builtin_cpu_supports("avx2");
#endif

void add_floats(double* lanes, const float* values, std::size_t count) {
#if defined(__x86_64__)
  if (has_avx2) return add_avx2(lanes, values, count);
#endif
  add_baseline(lanes, values, count);
}

std::size_t bytes_of(Format format) { return format == Format::float32 ? sizeof(float) : sizeof(std::uint16_t); }

Array part_of(const Array& array, std::size_t begin) {
  return {array.format, static_cast<std::byte*>(array.data) + begin * bytes_of(array.format)};
}

}  // namespace

/// The values go to the lanes from `first` on. A block's values come in parts, so the first ones of a part may have
/// to complete a row of lanes.
void Squares::add_to(std::array<double, kLanes>& lanes, std::size_t first, const Array& values, std::size_t count) {
  float scratch[kBlock];
  const float* floats = static_cast<const float*>(values.data);
  if (values.format != Format::float32) {
    decode(values, 0, count, scratch);
    floats = scratch;
  }
  const std::size_t lead = std::min(count, (kLanes - first % kLanes) % kLanes);
  for (std::size_t i = 0; i < lead; ++i) {
    const double value = floats[i];
    lanes[(first + i) % kLanes] += value * value;
  }
  add_floats(lanes.data(), floats + lead, count - lead);
}

double Squares::end(const std::array<double, kLanes>& lanes) {
  double sum = lanes[0];
  for (std::size_t i = 1; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

double Squares::of_block(const Array& values, std::size_t count) {
  std::array<double, kLanes> lanes = {};
  add_to(lanes, 0, values, count);
  return end(lanes);
}

void Squares::add(const Array& values, std::size_t count) {
  for (std::size_t at = 0, next = 0; at < count; at = next) {
    next = std::min(count, at + kBlock - in_block_);
    add_to(lanes_, in_block_, part_of(values, at), next - at);
    in_block_ += next - at;
    if (in_block_ < kBlock) continue;
    total_ += end(lanes_);
    lanes_ = {};
    in_block_ = 0;
  }
}

double Squares::sum() const { return in_block_ > 0 ? total_ + end(lanes_) : total_; }

}  // namespace zeropage::kernels
