#include "zeropage/kernels/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zeropage::kernels {

#if defined(__x86_64__)

namespace {

constexpr std::size_t kLine = 64, kStep = 4 * kLine;

}  // namespace

void copy_past_caches(void* to, const void* from, std::size_t bytes) {
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  const std::size_t before = std::min(bytes, -reinterpret_cast<std::uintptr_t>(to) % kLine);
  std::memcpy(out, in, before);
  std::size_t at = before;
  for (; at + kStep <= bytes; at += kStep) {
    __m128i words[kStep / sizeof(__m128i)];
    for (std::size_t i = 0; i < std::size(words); ++i) {
      words[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at) + i);
    }
    for (std::size_t i = 0; i < std::size(words); ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + at) + i, words[i]);
    }
  }
  _mm_sfence();
  std::memcpy(out + at, in + at, bytes - at);
}

#else

void copy_past_caches(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

#endif

}  // namespace zeropage::kernels
