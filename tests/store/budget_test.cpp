#include "zeropage/store/budget.h"

#include <doctest/doctest.h>

#include <thread>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

using namespace zeropage;

TEST_CASE("reservations never pass the limit and return their bytes") {
  Budget budget("host_memory", 100);
  {
    Reservation a = budget.try_reserve(60);
    CHECK(a);
    CHECK_FALSE(budget.try_reserve(41));
    Reservation b = budget.try_reserve(40);
    CHECK(b);
    CHECK(budget.used() == 100);
  }
  CHECK(budget.used() == 0);
  CHECK(budget.peak() == 100);
  CHECK_FALSE(budget.try_reserve(101));
  CHECK_FALSE(budget.try_reserve(~std::size_t{0}));
}

TEST_CASE("threads that reserve at once cannot pass the limit together") {
  Budget budget("host_memory", 1000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10000; ++i) Reservation held = budget.try_reserve(400);
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(budget.used() == 0);
  CHECK(budget.peak() <= 1000);
}

TEST_CASE("sizes are read as people write them") {
  CHECK(parse_bytes("256MB", "x") == 256000000);
  CHECK(parse_bytes("1.5 GiB", "x") == 3 * kGiB / 2);
  CHECK(parse_bytes("64kb", "x") == 64000);
  CHECK(parse_bytes("123", "x") == 123);
  for (const char* wrong : {"", "MB", "-1", "12 parsecs", "nan", "1e400GB"}) {
    CAPTURE(wrong);
    CHECK_THROWS_WITH_AS(parse_bytes(wrong, "host_memory"), doctest::Contains("host_memory"), ConfigError);
  }
  CHECK(format_bytes(999) == "999 B");
  CHECK(format_bytes(1370000000) == "1.4 GB");
}
