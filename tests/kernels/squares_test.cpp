#include "zeropage/kernels/squares.h"

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

using namespace zeropage::kernels;

namespace {

std::vector<float> values_of(std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::normal_distribution<float> draw(0.0F, 3.0F);
  std::vector<float> values(count);
  for (float& value : values) value = draw(random);
  return values;
}

double in_one(std::vector<float>& values) {
  Squares squares;
  squares.add({Format::float32, values.data()}, values.size());
  return squares.sum();
}

}  // namespace

TEST_CASE("the sum of squares is that of the values") {
  for (const std::size_t count : {0, 1, 7, 8, 9, 4095, 4096, 4097, 100'000}) {
    std::vector<float> values = values_of(count);
    long double expected = 0;
    for (const float value : values) expected += static_cast<long double>(value) * value;
    CHECK(std::abs(in_one(values) - static_cast<double>(expected)) <= 1e-13 * static_cast<double>(expected));
  }
}

TEST_CASE("the sum of squares does not depend on the cuts") {
  std::vector<float> values = values_of(30'011);
  const double expected = in_one(values);
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Squares squares;
    const std::size_t most = round % 2 == 0 ? 9'000 : 40;
    for (std::size_t at = 0; at < values.size();) {
      const std::size_t count = std::min(values.size() - at, 1 + random() % most);
      squares.add({Format::float32, values.data() + at}, count);
      at += count;
    }
    CHECK(squares.sum() == expected);
  }
  Squares by_blocks;
  for (std::size_t at = 0; at < values.size(); at += Squares::kBlock) {
    const std::size_t count = std::min(Squares::kBlock, values.size() - at);
    by_blocks.add_block(Squares::of_block({Format::float32, values.data() + at}, count));
  }
  CHECK(by_blocks.sum() == expected);
}

TEST_CASE("the squares of narrow values are those of the floats that they stand for") {
  std::vector<float> values = values_of(9'000);
  for (const Format format : {Format::bfloat16, Format::float16}) {
    std::vector<std::uint16_t> narrow(values.size());
    std::vector<float> wide(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      narrow[i] = format == Format::bfloat16 ? to_bfloat16(values[i]) : to_float16(values[i]);
      wide[i] = format == Format::bfloat16 ? from_bfloat16(narrow[i]) : from_float16(narrow[i]);
    }
    Squares squares;
    squares.add({format, narrow.data()}, narrow.size());
    CHECK(squares.sum() == in_one(wide));
  }
}
