#include "zeropage/kernels/norm.h"

#include <algorithm>
#include <cmath>

namespace zeropage::kernels {
namespace {

template <bool kFused>
[[gnu::always_inline]] inline float add_square(float sum, float value) {
  return kFused ? __builtin_fmaf(value, value, sum) : sum + value * value;
}

template <std::size_t kLanes, bool kFused>
[[gnu::always_inline]] inline void add_squares(float* lanes, const float* values, std::size_t count) {
  std::array<float, kLanes> sums;
  std::copy_n(lanes, kLanes, sums.begin());
  for (std::size_t i = 0; i + kLanes <= count; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) sums[j] = add_square<kFused>(sums[j], values[i + j]);
  }
  std::copy(sums.begin(), sums.end(), lanes);
}

template <bool kFused>
[[gnu::always_inline]] inline void add_by_lanes(std::size_t lane_count, float* lanes, const float* values,
                                                std::size_t count) {
  if (lane_count == 16) return add_squares<16, kFused>(lanes, values, count);
  if (lane_count == 8) return add_squares<8, kFused>(lanes, values, count);
  add_squares<4, kFused>(lanes, values, count);
}

#if defined(__x86_64__)
#define ZEROPAGE_FUSED [[gnu::target("avx2,fma")]]
#else
#define ZEROPAGE_FUSED
#endif

ZEROPAGE_FUSED void add_fused(std::size_t lane_count, float* lanes, const float* values, std::size_t count) {
  add_by_lanes<true>(lane_count, lanes, values, count);
}
ZEROPAGE_FUSED float add_tail_fused(float sum, const float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum = add_square<true>(sum, values[i]);
  return sum;
}

#undef ZEROPAGE_FUSED

void add_separate(std::size_t lane_count, float* lanes, const float* values, std::size_t count) {
  add_by_lanes<false>(lane_count, lanes, values, count);
}
float add_tail_separate(float sum, const float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum = add_square<false>(sum, values[i]);
  return sum;
}

bool can_fuse() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

}  // namespace

std::vector<NormInOrder::Form> NormInOrder::forms() {
  std::vector<Form> forms;
  for (const std::size_t lanes : {16, 8, 4}) {
    for (const bool fused : {true, false}) {
      for (const std::size_t tail : {0, 8, 4, 1}) {
        if (can_fuse() || (!fused && tail == 1)) forms.push_back({lanes, fused, tail});
      }
    }
  }
  return forms;
}

void NormInOrder::add(const float* values, std::size_t count) {
  (form_.fused ? add_fused : add_separate)(form_.lanes, lanes_.data(), values, count);
  rest_count_ = count % form_.lanes;
  std::copy_n(values + count - rest_count_, rest_count_, rest_.begin());
}

float NormInOrder::norm() const {
  float sum = lanes_[0];
  for (std::size_t i = 1; i < form_.lanes; ++i) sum = sum + lanes_[i];
  const std::size_t separate = form_.tail ? rest_count_ / form_.tail * form_.tail : 0;
  sum = add_tail_separate(sum, rest_.data(), separate);
  if (separate < rest_count_) sum = add_tail_fused(sum, rest_.data() + separate, rest_count_ - separate);
  return std::sqrt(sum);
}

}  // namespace zeropage::kernels
