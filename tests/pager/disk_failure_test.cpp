#include <doctest/doctest.h>

#include <cerrno>

#include "pager/cache_fixture.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

TEST_CASE_FIXTURE(CacheFixture,
                  "a short read leaves the page at home, is an error that names the file, and can be tried again") {
  make(256 * K, 0, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(100 * K);
  write(*a, 1);
  cache->evict(*a);
  io->set_outcome([](const Transfer& t) { return t.direction == Direction::read ? 0L : 1L; });
  const PinRequest request{a.get(), Access::read};
  CHECK_THROWS_WITH_AS(cache->pin({&request, 1}), doctest::Contains("the swap file in"), DiskError);
  CHECK_FALSE(cache->resident(*a));
  CHECK(a->data == nullptr);
  for (Access access : {Access::read, Access::write}) {
    PagePin page = cache->pin_page(*a, 1, access);
    CHECK_THROWS_AS(page.wait(), DiskError);
  }
  CHECK(cache->usage(Pool::device).now == 0);
  io->set_outcome([](const Transfer&) { return 1L; });
  CHECK(holds(*a, 1));
}

TEST_CASE_FIXTURE(CacheFixture, "a tensor may die while a page that could not be read is still pinned") {
  make(256 * K, 0, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(100 * K);
  write(*a, 1);
  cache->evict(*a);
  io->set_outcome([](const Transfer& t) { return t.direction == Direction::read ? -static_cast<long>(EIO) : 1L; });
  {
    PagePin pin = cache->pin_page(*a, 0, Access::read);
    io->wait_all();
    a.reset();
    CHECK_THROWS_AS(pin.wait(), DiskError);
  }
  CHECK(cache->usage(Pool::device).now == 0);
}

TEST_CASE_FIXTURE(CacheFixture, "a write that fails leaves the page dirty in memory, and its content is not lost") {
  make(256 * K, 0, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(200 * K), b = segment(200 * K);
  write(*a, 1);
  io->set_outcome(
      [](const Transfer& t) { return t.direction == Direction::write ? -static_cast<long>(ENOSPC) : 1L; });
  CHECK_THROWS_WITH_AS(write(*b, 2), doctest::Contains("No space left on device"), DiskError);
  CHECK(holds(*a, 1));
  CHECK_THROWS_AS(cache->evict(*a), DiskError);
  CHECK(holds(*a, 1));
  io->wait_all();  // the background write failed too, and its error surfaces once
  try {
    cache->wait();
  } catch (const DiskError&) {
  }
  io->set_outcome([](const Transfer&) { return 1L; });
  write(*b, 2);
  CHECK(holds(*a, 1));
  CHECK(holds(*b, 2));
}

TEST_CASE_FIXTURE(CacheFixture,
                  "a failure of a write behind surfaces once at wait(), typed, and the page is written again") {
  make(64 * K, 256 * K, 4 * kBlockBytes, /*failing=*/true);
  std::vector<std::unique_ptr<TestSegment>> segments;
  bool fail = true;
  io->set_outcome([&](const Transfer& t) {
    return t.direction == Direction::write && std::exchange(fail, false) ? -static_cast<long>(EIO) : 1L;
  });
  for (unsigned i = 0; i < 5; ++i) {
    segments.push_back(segment(60 * K));
    write(*segments[i], i);
  }
  CHECK(io->writes > 0);
  CHECK_THROWS_WITH_AS(cache->wait(), doctest::Contains("Input/output error"), DiskError);
  CHECK_NOTHROW(cache->wait());
  for (auto& s : segments) cache->evict(*s);
  for (unsigned i = 0; i < 5; ++i) CHECK(holds(*segments[i], i));
}

TEST_CASE_FIXTURE(CacheFixture, "background writes that keep failing raise an error, and are not tried for ever") {
  make(256 * K, 0, 4 * kBlockBytes, /*failing=*/true);
  std::vector<std::unique_ptr<TestSegment>> segments;
  for (unsigned i = 0; i < 40; ++i) segments.push_back(segment(16 * K));
  for (int period = 0; period < 3; ++period) {
    for (unsigned i = 0; i < 40; ++i) write(*segments[i], i);
  }
  cache->wait();
  const int before = io->writes;
  io->set_outcome([](const Transfer& t) { return t.direction == Direction::write ? -static_cast<long>(EIO) : 1L; });
  int told = 0;
  for (unsigned i = 0; i < 40 && told == 0; ++i) {
    try {
      const PinRequest request{segments[i].get(), Access::write};
      cache->pin({&request, 1});
      cache->unpin({&request, 1});
    } catch (const DiskError&) {
      ++told;
    }
  }
  try {
    cache->wait();
  } catch (const DiskError&) {
    ++told;
  }
  CHECK(told > 0);
  CHECK(io->writes - before < 100);
  io->set_outcome([](const Transfer&) { return 1L; });
  for (unsigned i = 0; i < 40; ++i) CHECK(holds(*segments[i], i));
}
