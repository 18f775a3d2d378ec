// What is read before anybody asks for it: whole segments, the guess of which, and what a disk does to both.
#include <doctest/doctest.h>

#include <cerrno>

#include "pager/pager_fixture.h"
#include "zeropage/base/errors.h"
#include "zeropage/pager/foresight.h"

using namespace zeropage;

constexpr std::size_t K = kKiB;

namespace {

std::vector<Segment*> coming(const Foresight& foresight, std::size_t most = 100) {
  std::vector<Segment*> seen;
  foresight.for_each_coming([&](Segment& segment) {
    seen.push_back(&segment);
    return seen.size() < most;
  });
  return seen;
}

}  // namespace

TEST_CASE_FIXTURE(PagerFixture, "a segment that was read ahead is whole, is read once, and needs no fault") {
  make(128 * K, 256 * K);
  auto a = segment(100 * K);
  write(*a, 1);
  pager->evict(*a);
  const auto before = pager->stats();
  CHECK(pager->prefetch(*a));
  CHECK(pager->prefetch(*a));  // it is under way
  CHECK(pager->resident(*a));
  CHECK(holds(*a, 1));
  CHECK(pager->stats().faults == before.faults);
  CHECK(pager->stats().read_bytes - before.read_bytes == 100 * K);
}

TEST_CASE_FIXTURE(PagerFixture, "a page of a segment that is being read whole can be written") {
  make(128 * K, 256 * K);
  auto a = segment(100 * K);
  write(*a, 1);
  pager->evict(*a);
  CHECK(pager->prefetch(*a));
  {
    PagePin page = pager->pin_page(*a, 3, Access::write);
    page.wait();
    CHECK(page.data()[5] == pattern(1, 3 * a->page_bytes() + 5));
    page.data()[5] = pattern(1, 3 * a->page_bytes() + 5);
  }
  pager->evict(*a);
  CHECK(holds(*a, 1));
}

TEST_CASE_FIXTURE(PagerFixture, "nothing is read ahead where memory would have to be waited for") {
  make(0, 128 * K, 4 * kBlockBytes, /*failing=*/true);  // whose transfers run when they are waited for
  auto a = segment(100 * K), b = segment(120 * K);
  for (std::size_t i = 0; i < a->pages(); ++i) {
    PagePin page = pager->pin_page(*a, i, Access::overwrite);
    std::memset(page.data(), 1, a->bytes_of(i));
  }
  pager->evict(*a);
  for (std::size_t i = 0; i < b->pages(); ++i) {
    PagePin page = pager->pin_page(*b, i, Access::overwrite);
    std::memset(page.data(), 2, b->bytes_of(i));
  }
  const int reads = io->reads;
  CHECK_FALSE(pager->prefetch(*a));  // the host is full of what has yet to be written
  CHECK_FALSE(pager->prefetch_page(*a, 0));
  CHECK(io->reads == reads);
  CHECK(pager->budget(Pool::host).used() <= 128 * K);
}

TEST_CASE_FIXTURE(PagerFixture,
                  "if one page of a segment that is read ahead fails, all are at home, and are read again") {
  make(128 * K, 256 * K, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(100 * K);
  write(*a, 1);
  pager->evict(*a);
  int count = 0;
  const auto third_fails = [&](const Transfer&) { return ++count == 3 ? -static_cast<long>(EIO) : 1L; };
  const PinRequest request{a.get(), Access::read};
  io->outcome = third_fails;
  CHECK(pager->prefetch(*a));
  CHECK_THROWS_AS(pager->pin({&request, 1}), DiskError);
  CHECK_FALSE(pager->resident(*a));
  CHECK(pager->budget(Pool::host).used() == 0);
  CHECK(pager->budget(Pool::device).used() == 0);
  for (Access access : {Access::read, Access::write}) {
    count = 0;
    CHECK(pager->prefetch(*a));
    CHECK_THROWS_AS(pager->pin_page(*a, 0, access).wait(), DiskError);
    CHECK_FALSE(pager->resident(*a));
    CHECK(pager->budget(Pool::host).used() == 0);
  }
  io->outcome = [](const Transfer&) { return 1L; };
  CHECK(pager->prefetch(*a));
  CHECK(holds(*a, 1));
}

TEST_CASE("what comes next is what came next, forward and backward told apart by the way there") {
  std::unique_ptr<TestSegment> layers[3];
  for (auto& layer : layers) layer = std::make_unique<TestSegment>();
  Segment *a = layers[0].get(), *b = layers[1].get(), *c = layers[2].get();
  Foresight foresight;
  const auto step = [&] {
    for (Segment* segment : {a, b, c, c, b, a}) foresight.visit(*segment);  // forward, backward
  };
  step();
  CHECK(coming(foresight).empty());
  step();
  foresight.visit(*b);
  CHECK(coming(foresight, 5) == std::vector<Segment*>{b, c, b, a});  // as the step before
  foresight.visit(*c);
  foresight.visit(*b);
  CHECK(coming(foresight, 2) == std::vector<Segment*>{b, a});
}

TEST_CASE("foresight finds its place again after something new, and forgets what died") {
  std::unique_ptr<TestSegment> layers[5];
  for (auto& layer : layers) layer = std::make_unique<TestSegment>();
  Foresight foresight;
  const auto epoch = [&] {
    for (auto& layer : layers) {
      if (layer) foresight.visit(*layer);
    }
  };
  epoch(), epoch();
  foresight.visit(*layers[2]);  // as never before
  CHECK(coming(foresight).empty());
  foresight.visit(*layers[3]);
  REQUIRE(coming(foresight, 2) == std::vector<Segment*>{layers[3].get(), layers[4].get()});
  foresight.forget(*layers[4]);
  Segment* dead = layers[4].get();
  layers[4].reset();
  for (Segment* segment : coming(foresight)) CHECK(segment != dead);
  epoch(), epoch();
  foresight.visit(*layers[0]);
  CHECK(coming(foresight, 4) ==
        std::vector<Segment*>{layers[0].get(), layers[1].get(), layers[2].get(), layers[3].get()});
}
