#include "zeropage/kernels/block_codes.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace zeropage::kernels;

namespace {

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = normal(random) * std::exp2(static_cast<float>(i / kQuantum));
  return values;
}

std::vector<float> there_and_back(std::vector<float> values, CodeBits bits) {
  std::vector<std::byte> coded(coded_bytes(values.size(), bits));
  code({Format::float32, values.data()}, values.size(), bits, coded.data());
  std::vector<float> back(values.size());
  uncode(coded.data(), 0, back.size(), bits, {Format::float32, back.data()});
  return back;
}

}  // namespace

TEST_CASE("an element comes back within half a scale of its block") {
  for (const CodeBits bits : {CodeBits::four, CodeBits::eight}) {
    const float most = bits == CodeBits::eight ? 127 : 7;
    for (const std::size_t count : {1, 2, 63, 255, 256, 257, 1000, 5000}) {
      const auto values = random_values(count, static_cast<unsigned>(count));
      const auto back = there_and_back(values, bits);
      for (std::size_t begin = 0; begin < count; begin += kQuantum) {
        float largest = 0;
        const std::size_t end = std::min(begin + kQuantum, count);
        for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
        for (std::size_t i = begin; i < end; ++i) {
          REQUIRE(std::abs(back[i] - values[i]) <= largest / most * 0.5001f);
          if (std::abs(values[i]) == largest) REQUIRE(std::abs(back[i] - values[i]) <= largest * 1e-6f);
        }
      }
      // A second time changes nothing more than the scale's rounding.
      const auto twice = there_and_back(back, bits);
      for (std::size_t i = 0; i < count; ++i) REQUIRE(std::abs(twice[i] - back[i]) <= std::abs(back[i]) * 1e-6f);
    }
  }
}

TEST_CASE("blocks without a number come back as NaN, and tiny ones as zeros") {
  for (const CodeBits bits : {CodeBits::four, CodeBits::eight}) {
    auto values = random_values(3 * kQuantum, 1);
    values[5] = std::numeric_limits<float>::infinity();
    values[kQuantum + 9] = std::numeric_limits<float>::quiet_NaN();
    for (std::size_t i = 2 * kQuantum; i < values.size(); ++i) values[i] = 0x1p-110f;
    const auto back = there_and_back(values, bits);
    for (std::size_t i = 0; i < 2 * kQuantum; ++i) REQUIRE(std::isnan(back[i]));
    for (std::size_t i = 2 * kQuantum; i < values.size(); ++i) REQUIRE(back[i] == 0);
  }
}

TEST_CASE("codes at the end of the memory that they fill are read before they are overwritten") {
  for (const Format format : {Format::bfloat16, Format::float16, Format::float32}) {
    const std::size_t item = format == Format::float32 ? 4 : 2;
    for (const CodeBits bits : {CodeBits::four, CodeBits::eight}) {
      for (const std::size_t count : {64, 192, 256, 320, 4096, 10'048}) {
        const auto values = random_values(count, 3);
        std::vector<std::byte> coded(coded_bytes(count, bits)), expected(count * item), memory(count * item);
        code({Format::float32, const_cast<float*>(values.data())}, count, bits, coded.data());
        uncode(coded.data(), 0, count, bits, {format, expected.data()});
        std::byte* const at = memory.data() + memory.size() - coded.size();
        std::copy(coded.begin(), coded.end(), at);
        uncode(at, 0, count, bits, {format, memory.data()});
        REQUIRE(memory == expected);
      }
    }
  }
}

TEST_CASE("a range of blocks comes back as in the whole") {
  for (const CodeBits bits : {CodeBits::four, CodeBits::eight}) {
    const auto values = random_values(1000, 4);
    std::vector<std::byte> coded(coded_bytes(1000, bits));
    code({Format::float32, const_cast<float*>(values.data())}, 1000, bits, coded.data());
    const auto whole = there_and_back(values, bits);
    std::vector<float> range(1000 - 2 * kQuantum);
    uncode(coded.data(), 2 * kQuantum, range.size(), bits, {Format::float32, range.data()});
    REQUIRE(std::equal(range.begin(), range.end(), whole.begin() + 2 * kQuantum));
  }
}
