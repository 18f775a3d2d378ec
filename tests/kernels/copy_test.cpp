#include "zeropage/kernels/copy.h"

#include <doctest/doctest.h>

#include <cstddef>
#include <numeric>
#include <vector>

TEST_CASE("a copy past the caches writes the bytes asked for, wherever they begin and end") {
  std::vector<unsigned char> from(2000);
  std::iota(from.begin(), from.end(), static_cast<unsigned char>(1));
  for (std::size_t bytes = 0; bytes <= 1100; bytes = bytes < 300 ? bytes + 1 : bytes + 37) {
    for (const std::size_t to_at : {0, 1, 17, 63, 64, 100}) {
      for (const std::size_t from_at : {0, 5, 64}) {
        std::vector<unsigned char> to(2000, 0), expected(2000, 0);
        for (std::size_t i = 0; i < bytes; ++i) expected[to_at + i] = from[from_at + i];
        zeropage::kernels::copy_past_caches(to.data() + to_at, from.data() + from_at, bytes);
        REQUIRE(to == expected);
      }
    }
  }
}
