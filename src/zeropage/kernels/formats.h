// Number formats, and conversions of blocks between them and floats. Plain loops, always inlined, so that each is
// compiled for its caller's instruction set. No torch.
//
//   float32              as it is
//   bfloat16, float16    IEEE 754's round to nearest, ties to even
//   stochastic_bfloat16  rounded up or down at random, with the probability that keeps the mean: small additions are
//                        not lost (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015). The random
//                        numbers follow from a seed and the value alone: the same however tensors are cut
//   hi_lo_float32        a bfloat16 and the 16 bits that it lacks, in two arrays: nothing is lost, and the first
//                        array is what operators see. float = (bfloat16 << 16) + signed remainder; ties round
//                        away from zero
//   blocks8              a float of 8 bits, times a scale that kQuantum elements share (after Dettmers et al., "8-bit
//                        Optimizers via Block-wise Quantization", 2021). Signed: 3 bits of exponent, 4 of mantissa.
//                        Unsigned: 4 and 4; what is not zero stays so
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace zeropage::kernels {

enum class Format : std::uint8_t {
  none,
  float32,
  bfloat16,
  float16,
  stochastic_bfloat16,
  hi_lo_float32,
  signed_blocks8,
  unsigned_blocks8,
};

/// Elements that share a scale. Blocks begin at multiples of it.
inline constexpr std::size_t kQuantum = 256;

/// One array of a tensor. `extra`: the remainders (int16) of hi_lo_float32, the scales (float) of blocks8.
struct Array {
  Format format = Format::none;
  void* data = nullptr;
  void* extra = nullptr;
  std::uint32_t seed = 0;  // of stochastic_bfloat16: a new one for each write
};

#define ZEROPAGE_INLINE [[gnu::always_inline]] inline

ZEROPAGE_INLINE float from_bfloat16(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

ZEROPAGE_INLINE std::uint16_t to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<std::uint16_t>((nan ? 0x7fc00000 : rounded) >> 16);
}

/// A well-mixed word: two rounds of multiply and xor-shift (after Ellis, "Hash Prospector").
ZEROPAGE_INLINE std::uint32_t hash(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x21f0aaad;
  x ^= x >> 15;
  x *= 0x735a2d97;
  return x ^ (x >> 15);
}

ZEROPAGE_INLINE std::uint16_t to_stochastic_bfloat16(float x, std::uint32_t random) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const bool finite = (bits & 0x7f800000) != 0x7f800000;
  return finite ? static_cast<std::uint16_t>((bits + (random & 0xffff)) >> 16) : to_bfloat16(x);
}

ZEROPAGE_INLINE float from_float16(std::uint16_t x) {
  // Handles denormals by a multiplication, and infinities and NaNs by their exponent.
  const std::uint32_t magnitude = std::uint32_t{x & 0x7fffu} << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const std::uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special | (std::uint32_t{x & 0x8000u} << 16));
}

ZEROPAGE_INLINE std::uint16_t to_float16(float x) {
  // Adding and subtracting a number of the right exponent rounds in hardware, denormals too (Fabian Giesen, 2012).
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits & 0x80000000, magnitude = bits ^ sign;
  const auto denormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  const std::uint32_t normal = magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1);
  std::uint32_t half = magnitude < 0x38800000 ? denormal : normal >> 13;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;  // rounds to infinity
  half = magnitude > 0x7f800000 ? 0x7e00 : half;
  return static_cast<std::uint16_t>(half | (sign >> 16));
}

ZEROPAGE_INLINE float join_hi_lo(std::uint16_t high, std::int16_t low) {
  return std::bit_cast<float>((std::uint32_t{high} << 16) + static_cast<std::uint32_t>(std::int32_t{low}));
}
ZEROPAGE_INLINE std::uint16_t high_of(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>(x != x ? 0x7fc0 : (bits + 0x8000) >> 16);  // overflow becomes infinite
}
ZEROPAGE_INLINE std::int16_t low_of(float x, std::uint16_t high) {
  const std::uint32_t rest = std::bit_cast<std::uint32_t>(x) - (std::uint32_t{high} << 16);
  return static_cast<std::int16_t>(x != x ? 0 : rest);
}

}  // namespace zeropage::kernels
