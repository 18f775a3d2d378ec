// Content on its way between ranks in 8 or 4 bits an element: blocks of kQuantum elements, each a scale and codes
// (after Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023).
//
//   block | scale (float32) | codes: 8 bits, or two of 4 bits in a byte, the even element in the low half |
//
// scale = max |x| / m and code = x / scale, rounded to nearest, ties to even; m is 127, or 7 for 4 bits. An element
// comes back within scale / 2. A block with an infinity or NaN comes back as NaN, and one whose elements are all
// below 2^-100 as zeros. No torch, no allocation, no threads.
#pragma once

#include <cstddef>

#include "zeropage/kernels/formats.h"

namespace zeropage::kernels {

enum class CodeBits : std::uint8_t { four = 4, eight = 8 };

inline constexpr std::size_t kScaleBytes = sizeof(float);

/// The codes' bytes for `elements` consecutive elements, whose last block may be short. An odd number of them takes
/// half a byte more.
constexpr std::size_t coded_bytes(std::size_t elements, CodeBits bits) {
  const std::size_t blocks = (elements + kQuantum - 1) / kQuantum;
  return blocks * kScaleBytes + (bits == CodeBits::eight ? elements : (elements + 1) / 2);
}

/// Codes elements [0, count) of `from`: float32, bfloat16 or float16. `to` has coded_bytes(count, bits).
void code(const Array& from, std::size_t count, CodeBits bits, std::byte* to);

/// Writes elements [begin, begin + count) of `coded` to [0, count) of `to`: float32, bfloat16 or float16. `begin` is
/// a multiple of kQuantum. `to` may begin up to coded_bytes(count, bits) before the end of what it will fill, if the
/// codes end there and no element has fewer bytes than its code: each block is read before it is written.
void uncode(const std::byte* coded, std::size_t begin, std::size_t count, CodeBits bits, const Array& to);

}  // namespace zeropage::kernels
