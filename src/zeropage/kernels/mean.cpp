#include "zeropage/kernels/mean.h"

#include <algorithm>

#include "zeropage/kernels/update.h"

namespace zeropage::kernels {
namespace {

constexpr std::size_t kBlock = 1024;  // elements: a few blocks of floats fit the first-level cache

std::size_t bytes_of(Format format) { return format == Format::float32 ? sizeof(float) : sizeof(std::uint16_t); }

Array at(const Array& array, std::size_t begin) {
  return {array.format, static_cast<std::byte*>(array.data) + begin * bytes_of(array.format)};
}

/// The array's first elements: its own memory if it holds floats.
const float* floats_of(const Array& array, std::size_t n, float* scratch) {
  if (array.format == Format::float32) return static_cast<const float*>(array.data);
  decode(array, 0, n, scratch);
  return scratch;
}

void round(Format format, float* values, std::size_t n) {
  if (format == Format::float32) return;
  std::uint16_t rounded[kBlock];
  const Array array{format, rounded};
  encode(array, 0, n, values);
  decode(array, 0, n, values);
}

void add(float* __restrict sum, const float* __restrict values, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += values[i];
}

void note_equal(std::uint8_t* __restrict equal, const float* __restrict first, const float* __restrict values,
                std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) equal[i] = equal[i] && values[i] == first[i];
}

void take_block(const Mean& mean, const Array& to, std::size_t begin, std::size_t n) {
  float sum[kBlock], first[kBlock], scratch[kBlock];
  std::uint8_t equal[kBlock];
  const float* const of_first = floats_of(at(mean.parts[0], begin), n, scratch);
  std::copy_n(of_first, n, sum);
  if (mean.keeps_equal) std::copy_n(of_first, n, first), std::fill_n(equal, n, std::uint8_t{1});
  for (const Array& part : mean.parts.subspan(1)) {
    const float* const values = floats_of(at(part, begin), n, scratch);
    add(sum, values, n);
    if (mean.keeps_equal) note_equal(equal, first, values, n);
  }
  const auto ranks = static_cast<float>(mean.parts.size());
  for (std::size_t i = 0; i < n; ++i) sum[i] /= ranks;
  round(mean.rounds_to, sum, n);
  if (mean.keeps_equal) {
    for (std::size_t i = 0; i < n; ++i) sum[i] = equal[i] ? first[i] : sum[i];
  }
  const Array target = at(to, begin);
  if (mean.adds) add(sum, floats_of(target, n, scratch), n);
  encode(target, 0, n, sum);
}

}  // namespace

void take_mean(const Mean& mean, const Array& to, std::size_t count) {
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    take_block(mean, to, begin, std::min(kBlock, count - begin));
  }
}

}  // namespace zeropage::kernels
