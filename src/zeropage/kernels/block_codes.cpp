#include "zeropage/kernels/block_codes.h"

#include <algorithm>
#include <limits>

#include "zeropage/kernels/update.h"

namespace zeropage::kernels {
namespace {

constexpr std::size_t bytes_of(Format format) {
  return format == Format::float32 ? sizeof(float) : sizeof(std::uint16_t);
}

Array at(const Array& array, std::size_t begin) {
  return {array.format, static_cast<std::byte*>(array.data) + begin * bytes_of(array.format)};
}

constexpr float most_of(CodeBits bits) { return bits == CodeBits::eight ? 127.0f : 7.0f; }

/// The largest magnitude as bits, by which infinities and NaNs are larger than any number.
std::uint32_t largest_bits(const float* __restrict values, std::size_t n) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  }
  return largest;
}

/// Rounds by an addition after which the result is in the lowest bits.
void to_codes(const float* __restrict values, float inverse, std::size_t n, std::int8_t* __restrict codes) {
  constexpr float kMagic = 0x1.8p23f;
  for (std::size_t i = 0; i < n; ++i) {
    const float shifted = values[i] * inverse + kMagic;
    codes[i] = static_cast<std::int8_t>(std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kMagic));
  }
}

void to_floats(const std::int8_t* __restrict codes, float scale, std::size_t n, float* __restrict values) {
  for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<float>(codes[i]) * scale;
}

void join_halves(const std::int8_t* __restrict codes, std::size_t n, std::uint8_t* __restrict joined) {
  for (std::size_t i = 0; i < n / 2; ++i) {
    joined[i] = static_cast<std::uint8_t>((codes[2 * i] & 0xf) | (codes[2 * i + 1] << 4));
  }
  if (n % 2 != 0) joined[n / 2] = static_cast<std::uint8_t>(codes[n - 1] & 0xf);
}

void split_halves(const std::uint8_t* __restrict joined, std::size_t n, std::int8_t* __restrict codes) {
  for (std::size_t i = 0; i < n / 2; ++i) {
    codes[2 * i] = static_cast<std::int8_t>(static_cast<std::int8_t>(joined[i] << 4) >> 4);
    codes[2 * i + 1] = static_cast<std::int8_t>(static_cast<std::int8_t>(joined[i]) >> 4);
  }
  if (n % 2 != 0) codes[n - 1] = static_cast<std::int8_t>(static_cast<std::int8_t>(joined[n / 2] << 4) >> 4);
}

}  // namespace

void code(const Array& from, std::size_t count, CodeBits bits, std::byte* to) {
  constexpr float kLeast = 0x1p-100f;
  for (std::size_t begin = 0; begin < count; begin += kQuantum) {
    const std::size_t n = std::min(kQuantum, count - begin);
    float values[kQuantum];
    std::int8_t codes[kQuantum];
    decode(at(from, begin), 0, n, values);
    const auto largest = std::bit_cast<float>(largest_bits(values, n));
    const bool is_finite = largest <= std::numeric_limits<float>::max();
    const bool is_zero = largest < kLeast || !is_finite;
    const float scale = !is_finite ? std::numeric_limits<float>::quiet_NaN()
                        : is_zero  ? 0.0f
                                   : largest / most_of(bits);
    is_zero ? void(std::fill_n(codes, n, std::int8_t{0})) : to_codes(values, most_of(bits) / largest, n, codes);
    std::memcpy(to, &scale, kScaleBytes);
    to += kScaleBytes;
    if (bits == CodeBits::eight) {
      std::memcpy(to, codes, n);
    } else {
      join_halves(codes, n, reinterpret_cast<std::uint8_t*>(to));
    }
    to += coded_bytes(n, bits) - kScaleBytes;
  }
}

void uncode(const std::byte* coded, std::size_t begin, std::size_t count, CodeBits bits, const Array& to) {
  coded += coded_bytes(begin, bits);
  for (std::size_t done = 0; done < count; done += kQuantum) {
    const std::size_t n = std::min(kQuantum, count - done);
    float scale = 0, values[kQuantum];
    std::int8_t codes[kQuantum];
    std::memcpy(&scale, coded, kScaleBytes);
    if (bits == CodeBits::eight) {
      std::memcpy(codes, coded + kScaleBytes, n);
    } else {
      split_halves(reinterpret_cast<const std::uint8_t*>(coded + kScaleBytes), n, codes);
    }
    to_floats(codes, scale, n, values);
    encode(at(to, done), 0, n, values);
    coded += coded_bytes(n, bits);
  }
}

}  // namespace zeropage::kernels
