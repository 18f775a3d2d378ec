#include "zeropage/kernels/mean.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

using namespace zeropage::kernels;

namespace {

std::size_t bytes_of(Format format) { return format == Format::float32 ? 4 : 2; }

/// One array and its values as floats.
struct Values {
  Values(Format format, std::size_t count) : format(format), memory(count * bytes_of(format)) {}

  Array array() { return {format, memory.data()}; }
  float get(std::size_t i) const {
    if (format == Format::float32) return reinterpret_cast<const float*>(memory.data())[i];
    const std::uint16_t value = reinterpret_cast<const std::uint16_t*>(memory.data())[i];
    return format == Format::bfloat16 ? from_bfloat16(value) : from_float16(value);
  }
  void set(std::size_t i, float value) {
    if (format == Format::float32) {
      reinterpret_cast<float*>(memory.data())[i] = value;
    } else {
      reinterpret_cast<std::uint16_t*>(memory.data())[i] =
          format == Format::bfloat16 ? to_bfloat16(value) : to_float16(value);
    }
  }

  Format format;
  std::vector<std::byte> memory;
};

float rounded(Format format, float value) {
  if (format == Format::bfloat16) return from_bfloat16(to_bfloat16(value));
  return format == Format::float16 ? from_float16(to_float16(value)) : value;
}

Values random_values(Format format, std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Values values(format, count);
  for (std::size_t i = 0; i < count; ++i) values.set(i, normal(random));
  return values;
}

}  // namespace

TEST_CASE("a mean over ranks is summed in order in float32, rounded once, and set or added") {
  constexpr Format formats[] = {Format::float32, Format::bfloat16, Format::float16};
  unsigned seed = 0;
  for (const std::size_t ranks : {1, 2, 3, 5}) {
    for (const std::size_t count : {0, 1, 7, 1024, 2500}) {
      for (const Format sent : formats) {
        for (const Format kept : formats) {
          for (const auto& [rounds_to, adds] : std::initializer_list<std::pair<Format, bool>>{
                   {Format::float32, false}, {sent, false}, {Format::float32, true}, {sent, true}}) {
            CAPTURE(ranks);
            CAPTURE(count);
            std::vector<Values> parts;
            for (std::size_t i = 0; i < ranks; ++i) parts.push_back(random_values(sent, count, ++seed));
            std::vector<Array> arrays;
            for (Values& part : parts) arrays.push_back(part.array());
            Values result = random_values(kept, count, ++seed);
            const Values before = result;
            take_mean({arrays, rounds_to, /*keeps_equal=*/false, adds}, result.array(), count);
            for (std::size_t i = 0; i < count; ++i) {
              float sum = parts[0].get(i);
              for (std::size_t rank = 1; rank < ranks; ++rank) sum += parts[rank].get(i);
              const float mean = rounded(rounds_to, sum / static_cast<float>(ranks));
              const float expected = rounded(kept, adds ? mean + before.get(i) : mean);
              REQUIRE(std::bit_cast<std::uint32_t>(result.get(i)) == std::bit_cast<std::uint32_t>(expected));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a value that all ranks have stays as it is where it should, and the mean may replace a part") {
  constexpr std::size_t kCount = 3000;
  std::vector<Values> parts(3, random_values(Format::float32, kCount, 1));
  for (std::size_t i = 0; i < kCount; i += 2) parts[2].set(i, 1.5f);
  parts[0].set(5, NAN);
  std::vector<Array> arrays;
  for (Values& part : parts) arrays.push_back(part.array());
  const std::vector<Values> before = parts;
  std::size_t changes = 0;
  for (std::size_t i = 1; i < kCount; i += 2) {
    const float value = before[1].get(i);
    changes += (value + value + value) / 3 != value;
  }
  CHECK(changes > 0);  // otherwise this test shows nothing
  take_mean({arrays, Format::float32, /*keeps_equal=*/true}, parts[0].array(), kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const float mean = (before[0].get(i) + before[1].get(i) + before[2].get(i)) / 3;
    const bool is_equal = before[0].get(i) == before[1].get(i) && before[1].get(i) == before[2].get(i);
    const float expected = is_equal ? before[0].get(i) : mean;
    if (std::isnan(expected)) {
      REQUIRE(std::isnan(parts[0].get(i)));
    } else {
      REQUIRE(parts[0].get(i) == expected);
    }
  }
}
