#include <doctest/doctest.h>

#include <cerrno>

#include "pager/cache_fixture.h"
#include "zeropage/base/errors.h"
#include "zeropage/io/buffers.h"

using namespace zeropage;

namespace {

struct HomeReadsFixture : CacheFixture {
  Buffer memory = make_buffer(16 * K);
  bool holds_page(unsigned seed, std::size_t page, std::size_t bytes) const {
    for (std::size_t k = 0; k < bytes; ++k) {
      if (memory.get()[k] != pattern(seed, page * 16 * K + k)) return false;
    }
    return true;
  }
};

}  // namespace

TEST_CASE_FIXTURE(HomeReadsFixture, "what is on disk alone is read past the cache, which stays as it is") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  CHECK_FALSE(cache->read_home(*a, 0, memory.get()));  // never written
  write(*a, 1);
  CHECK_FALSE(cache->read_home(*a, 0, memory.get()));  // in memory
  cache->evict(*a);
  const auto before = cache->stats();
  for (std::size_t i = 0; i < a->pages(); ++i) {
    HomeRead read = cache->read_home(*a, i, memory.get());
    REQUIRE(read);
    CHECK(read.wait());
    CHECK(holds_page(1, i, a->bytes_of(i)));
  }
  CHECK_FALSE(cache->resident(*a));
  CHECK(cache->stats().faults == before.faults);
  CHECK(cache->stats().read_bytes == before.read_bytes + 100 * K);
}

TEST_CASE_FIXTURE(HomeReadsFixture, "a read reports that its page changed meanwhile") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  write(*a, 1);
  cache->evict(*a);
  HomeRead read = cache->read_home(*a, 2, memory.get());
  write(*a, 2);
  cache->evict(*a);
  CHECK_FALSE(read.wait());
  HomeRead again = cache->read_home(*a, 2, memory.get());
  CHECK(again.wait());
  CHECK(holds_page(2, 2, 16 * K));
}

TEST_CASE_FIXTURE(HomeReadsFixture, "a second version that is open is not read, nor what is before it is settled") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  write(*a, 1);
  cache->evict(*a);
  REQUIRE(cache->open_version(*a, /*write_first=*/false));
  CHECK_FALSE(cache->read_home(*a, 0, memory.get()));
  cache->discard_version(*a);
  CHECK(cache->read_home(*a, 0, memory.get()).wait());
}

TEST_CASE_FIXTURE(HomeReadsFixture, "blocks of a page are read alone, and their errors and changes are reported") {
  make(256 * K, 256 * K, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(100 * K);
  write(*a, 1);
  CHECK_FALSE(cache->read_part_of_home(*a, 2, 0, kBlockBytes, memory.get()));  // in memory
  cache->evict(*a);
  const auto before = cache->stats();
  for (std::size_t at = 0; at < 16 * K; at += kBlockBytes) {
    HomeRead read = cache->read_part_of_home(*a, 2, at, kBlockBytes, memory.get() + at);
    REQUIRE(read);
    CHECK(read.wait());
  }
  CHECK(holds_page(1, 2, 16 * K));
  HomeRead end = cache->read_part_of_home(*a, 6, 0, kBlockBytes, memory.get());  // the last page has 4 KiB
  CHECK(end.wait());
  CHECK(holds_page(1, 6, 4 * K));
  CHECK(cache->stats().read_bytes == before.read_bytes + 20 * K);
  HomeRead changed = cache->read_part_of_home(*a, 2, 2 * kBlockBytes, kBlockBytes, memory.get());
  write(*a, 2);
  cache->evict(*a);
  CHECK_FALSE(changed.wait());
  io->set_outcome([](const Transfer&) { return -static_cast<long>(EIO); });
  HomeRead failed = cache->read_part_of_home(*a, 2, 0, kBlockBytes, memory.get());
  CHECK_THROWS_AS(static_cast<void>(failed.wait()), DiskError);
}
