#include "zeropage/kernels/update.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace zeropage::kernels;

namespace {

constexpr std::size_t kCount = 1000;

std::vector<float> random_floats(std::size_t n, float scale, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

Array floats(std::vector<float>& values) { return {Format::float32, values.data(), nullptr}; }

/// Converts values to a format, by an update with lr = 0 that writes what operators would see.
template <class T>
std::vector<T> as_seen(std::vector<float> values, Format format, std::uint32_t seed = 0) {
  std::vector<float> zeros(values.size(), 0.0f);
  std::vector<T> seen(values.size());
  Update update;
  update.rule = Rule::sgd;
  update.lr = 0;
  Arrays arrays{floats(values), floats(zeros), {format, seen.data(), nullptr, seed}, {}};
  zeropage::kernels::update(update, arrays, 0, values.size());
  return seen;
}

}  // namespace

TEST_CASE("every bfloat16 and float16 survives the way through float") {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (!std::isnan(from_bfloat16(half))) CHECK(to_bfloat16(from_bfloat16(half)) == half);
    if (!std::isnan(from_float16(half))) CHECK(to_float16(from_float16(half)) == half);
  }
  CHECK(std::isnan(from_bfloat16(to_bfloat16(NAN))));
  CHECK(std::isnan(from_float16(to_float16(NAN))));
}

TEST_CASE("casts round to nearest, ties to even") {
  CHECK(from_bfloat16(to_bfloat16(1.00390625f)) == 1.0f);       // half way, down to even
  CHECK(from_bfloat16(to_bfloat16(1.01171875f)) == 1.015625f);  // half way, up to even
  CHECK(std::isinf(from_bfloat16(to_bfloat16(std::numeric_limits<float>::max()))));
  CHECK(from_float16(to_float16(65519.0f)) == 65504.0f);
  CHECK(std::isinf(from_float16(to_float16(65520.0f))));
  CHECK(from_float16(to_float16(0x1p-24f)) == 0x1p-24f);  // the smallest denormal
  CHECK(from_float16(to_float16(0x1p-26f)) == 0.0f);
  for (const float value : random_floats(kCount, 10, 1)) {
    CHECK(std::fabs(from_bfloat16(to_bfloat16(value)) - value) <= std::fabs(value) / 256);
    CHECK(std::fabs(from_float16(to_float16(value)) - value) <= std::fabs(value) / 2048 + 0x1p-25f);
  }
}

TEST_CASE("a bfloat16 and its remainder are the float, to the bit") {
  auto values = random_floats(kCount, 1, 2);
  for (const float special : {0.0f, -0.0f, 1.00390625f, -1.00390625f, INFINITY, -INFINITY, 1e-42f, -3e-45f,
                              std::numeric_limits<float>::max(), std::numeric_limits<float>::lowest()}) {
    values.push_back(special);
  }
  for (const float value : values) {
    const std::uint16_t high = high_of(value);
    CHECK(std::bit_cast<std::uint32_t>(join_hi_lo(high, low_of(value, high))) == std::bit_cast<std::uint32_t>(value));
    if (std::fabs(value) < 3.38e38f) CHECK(std::fabs(from_bfloat16(high) - value) <= std::fabs(value) / 256 + 1e-40f);
  }
}

TEST_CASE("what is not a number stays so, and shows so") {
  for (const std::uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0xffffffffu}) {
    const auto value = std::bit_cast<float>(bits);
    CHECK(std::isnan(from_bfloat16(high_of(value))));
    CHECK(std::isnan(join_hi_lo(high_of(value), low_of(value, high_of(value)))));
  }
}

TEST_CASE("stochastic rounding keeps the mean, over values and over seeds, and is the same every time") {
  std::vector<float> values(1 << 16);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 1 + static_cast<float>(i) / (1 << 23);
  const auto seen = as_seen<std::uint16_t>(values, Format::stochastic_bfloat16, 7);
  CHECK(seen == as_seen<std::uint16_t>(values, Format::stochastic_bfloat16, 7));
  double error = 0;
  for (std::size_t i = 0; i < values.size(); ++i) error += from_bfloat16(seen[i]) - values[i];
  // One error deviates by less than half of 1/128, the mean of 65536 within five times a 256th of that.
  CHECK(std::fabs(error / static_cast<double>(values.size())) < 5 * 0.0039 / 256);
  double sum = 0;
  constexpr float kValue = 1.0f + 1.0f / 1024;  // an eighth of the way between two bfloat16s
  for (std::uint32_t seed = 0; seed < 4096; ++seed) {
    sum += from_bfloat16(as_seen<std::uint16_t>({kValue}, Format::stochastic_bfloat16, seed)[0]);
  }
  CHECK(std::fabs(sum / 4096 - kValue) < 5 * 0.0026 / 64);
}

TEST_CASE("moments of 8 bits are within a thirtieth, down to a small part of their block's largest") {
  for (const bool is_signed : {true, false}) {
    auto exact = random_floats(kCount, 0.01f, 3);
    if (!is_signed) {
      for (float& value : exact) value *= value;
    }
    std::vector<std::uint8_t> bytes(kCount, 0);
    std::vector<float> scales(kCount / kQuantum + 1, 0.0f), kept(kCount), again(kCount);
    const Array array{is_signed ? Format::signed_blocks8 : Format::unsigned_blocks8, bytes.data(), scales.data()};
    encode(array, 0, kCount, exact.data());
    decode(array, 0, kCount, kept.data());
    for (std::size_t i = 0; i < kCount; ++i) {
      const float largest = scales[i / kQuantum] * 1.9375f, error = std::fabs(kept[i] - exact[i]);
      if (std::fabs(exact[i]) > largest / (is_signed ? 100 : 10000)) CHECK(error <= std::fabs(exact[i]) / 30);
      CHECK((error <= largest / (is_signed ? 3000 : 400000) || error <= std::fabs(exact[i]) / 30));
      CHECK((is_signed || exact[i] == 0) == (is_signed || kept[i] == 0));
    }
    encode(array, 0, kCount, kept.data());
    decode(array, 0, kCount, again.data());
    CHECK(kept == again);
  }
}

TEST_CASE("a block of 8 bits with a value that is not finite is NaN as a whole, whatever the sign of the NaN") {
  for (const float value : {NAN, -NAN, INFINITY, -INFINITY}) {
    for (const Format format : {Format::signed_blocks8, Format::unsigned_blocks8}) {
      std::vector<float> exact(3 * kQuantum, 0.5f), kept(exact.size());
      exact[kQuantum + 7] = value;
      std::vector<std::uint8_t> bytes(exact.size(), 0);
      std::vector<float> scales(3, 0.0f);
      const Array array{format, bytes.data(), scales.data()};
      encode(array, 0, exact.size(), exact.data());
      decode(array, 0, exact.size(), kept.data());
      for (std::size_t i = 0; i < exact.size(); ++i) {
        CHECK(std::isnan(kept[i]) == (i / kQuantum == 1));
        CHECK(bytes[i] == (i / kQuantum == 1 ? 0 : bytes[0]));
      }
    }
  }
}

TEST_CASE("an update does not depend on how its range is cut, but at a vector's end") {
  for (const Rule rule : {Rule::adam, Rule::adamw, Rule::sgd, Rule::adagrad, Rule::lion}) {
    for (const bool store : {false, true}) {
      Update u;
      u.rule = rule;
      u.weight_decay = 0.1, u.momentum = 0.9, u.step = 3;
      u.scales[0] = {0.5f, false}, u.scale_count = 1;
      u.store_gradient = store;
      std::vector<float> results[2][5];
      for (int cut = 0; cut < 2; ++cut) {
        auto& r = results[cut];
        for (unsigned i = 0; i < 5; ++i) r[i] = random_floats(kCount, 0.1f, i);
        for (float& v : r[3]) v = std::fabs(v);
        const bool adam = rule == Rule::adam || rule == Rule::adamw;
        if (rule == Rule::adagrad) r[2] = r[3];
        Arrays arrays{floats(r[0]), floats(r[1]), {}, {floats(r[2]), adam ? floats(r[3]) : Array{}}};
        const std::size_t at = cut ? 512 : 0;
        if (cut) zeropage::kernels::update(u, arrays, 0, at);
        zeropage::kernels::update(u, arrays, at, kCount);
      }
      for (int i = 0; i < 5; ++i) CHECK(results[0][i] == results[1][i]);
    }
  }
}

TEST_CASE("what is not finite is counted, before scaling") {
  std::vector<float> parameter(64, 1.0f), gradient(64, 1.0f), m(64), v(64);
  gradient[3] = INFINITY, gradient[40] = -INFINITY, gradient[63] = NAN;
  Update u;
  Arrays arrays{floats(parameter), floats(gradient), {}, {floats(m), floats(v)}};
  CHECK(zeropage::kernels::update(u, arrays, 0, 64) == 3);
  u.store_gradient = true;
  u.scales[0] = {0.0f, false}, u.scale_count = 1;
  CHECK(zeropage::kernels::update(u, arrays, 0, 64) == 3);
}
