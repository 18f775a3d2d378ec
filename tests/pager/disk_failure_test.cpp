#include <doctest/doctest.h>

#include <cerrno>

#include "pager/pager_fixture.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

constexpr std::size_t K = kKiB;

TEST_CASE_FIXTURE(PagerFixture,
                  "a short read leaves the page at home, is an error that names the file, and can be tried again") {
  make(256 * K, 0, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(100 * K);
  write(*a, 1);
  pager->evict(*a);
  io->outcome = [](const Transfer& t) { return t.direction == Direction::read ? 0L : 1L; };
  const PinRequest request{a.get(), Access::read};
  CHECK_THROWS_WITH_AS(pager->pin({&request, 1}), doctest::Contains("the swap file in"), DiskError);
  CHECK_FALSE(pager->resident(*a));
  CHECK(a->data == nullptr);
  for (Access access : {Access::read, Access::write}) {
    PagePin page = pager->pin_page(*a, 1, access);
    CHECK_THROWS_AS(page.wait(), DiskError);
  }
  CHECK(pager->budget(Pool::device).used() == 0);
  io->outcome = [](const Transfer&) { return 1L; };
  CHECK(holds(*a, 1));
}

TEST_CASE_FIXTURE(PagerFixture, "a write that fails leaves the page dirty in memory, and its content is not lost") {
  make(256 * K, 0, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(200 * K), b = segment(200 * K);
  write(*a, 1);
  io->outcome = [](const Transfer& t) { return t.direction == Direction::write ? -static_cast<long>(ENOSPC) : 1L; };
  CHECK_THROWS_WITH_AS(write(*b, 2), doctest::Contains("No space left on device"), DiskError);
  CHECK(holds(*a, 1));
  CHECK_THROWS_AS(pager->evict(*a), DiskError);
  CHECK(holds(*a, 1));
  io->outcome = [](const Transfer&) { return 1L; };
  write(*b, 2);
  CHECK(holds(*a, 1));
  CHECK(holds(*b, 2));
}

TEST_CASE_FIXTURE(PagerFixture,
                  "a failure of a write behind surfaces once at wait(), typed, and the page is written again") {
  make(64 * K, 256 * K, 4 * kBlockBytes, /*failing=*/true);
  std::vector<std::unique_ptr<TestSegment>> segments;
  bool fail = true;
  io->outcome = [&](const Transfer& t) {
    return t.direction == Direction::write && std::exchange(fail, false) ? -static_cast<long>(EIO) : 1L;
  };
  for (unsigned i = 0; i < 5; ++i) {
    segments.push_back(segment(60 * K));
    write(*segments[i], i);
  }
  CHECK(io->writes > 0);
  CHECK_THROWS_WITH_AS(pager->wait(), doctest::Contains("Input/output error"), DiskError);
  CHECK_NOTHROW(pager->wait());
  for (auto& s : segments) pager->evict(*s);
  for (unsigned i = 0; i < 5; ++i) CHECK(holds(*segments[i], i));
}

TEST_CASE_FIXTURE(PagerFixture, "a read ahead that fails harms nobody who did not need it") {
  make(128 * K, 256 * K, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(100 * K), b = segment(120 * K);
  write(*a, 1);
  write(*b, 2);
  pager->evict(*a);
  pager->evict(*b);
  io->outcome = [](const Transfer&) { return -static_cast<long>(EIO); };
  pager->prefetch_page(*a, 0);
  pager->evict(*a);
  io->outcome = [](const Transfer&) { return 1L; };
  CHECK(holds(*b, 2));
  CHECK(holds(*a, 1));
}
