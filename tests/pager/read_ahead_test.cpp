// Prefetches, the evictions that make room for them, and the effects of a slow or failing disk on both.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "pager/cache_fixture.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

namespace {

struct CycleFixture : CacheFixture {
  std::vector<std::unique_ptr<TestSegment>> segments;

  void make_segments(unsigned count, std::size_t bytes) {
    for (unsigned i = 0; i < count; ++i) {
      segments.push_back(segment(bytes));
      write(*segments[i], i);
    }
  }
  void use(unsigned i, Access access = Access::read) {
    const PinRequest request{segments[i].get(), access};
    cache->pin({&request, 1});
    wrong += segments[i]->data[7] != pattern(i, 7);
    cache->unpin({&request, 1});
  }
  void cycle() {
    for (unsigned i = 0; i < segments.size(); ++i) use(i);
  }
  int wrong = 0;
};

}  // namespace

TEST_CASE_FIXTURE(CycleFixture,
                  "what the plan says comes next is read before it is asked for, whole, and read once") {
  make(100 * K, 150 * K);
  make_segments(4, 60 * K);
  cycle(), cycle();
  cache->wait();
  for (auto& s : segments) cache->evict(*s);
  cache->wait();
  const auto before = cache->stats();
  use(0);  // the first of a cycle
  for (unsigned i = 1; i < 4; ++i) {
    cache->wait();
    CHECK(cache->resident(*segments[i]));
    use(i);
  }
  CHECK(cache->stats().faults <= before.faults + 1);
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(CycleFixture,
                  "the pages of a lasting stream come without being asked for, in order and within bounds") {
  make(400 * K, 0);
  make_segments(12, 320 * K);  // much more than memory
  for (auto& segment : segments) cache->evict(*segment);
  cache->wait();
  const PinRequest requests[] = {{segments[0].get(), Access::read}, {segments[1].get(), Access::write}};
  const std::size_t read_before = cache->stats().read_bytes;
  cache->open_stream(requests);
  cache->wait();
  const auto before = cache->stats();
  CHECK(before.read_bytes > read_before);
  CHECK(before.read_bytes <= read_before + 2 * (400 * K / 8));  // the limits of the stream, and of what comes next
  for (std::size_t page = 0; page < segments[0]->pages(); ++page) {
    for (unsigned i = 0; i < 2; ++i) {
      PagePin pin = cache->try_pin_page(*segments[i], page, Access::read, /*is_brief=*/true);
      REQUIRE(pin);
      REQUIRE(pin.try_wait());
      wrong += pin.data()[7] != pattern(i, page * 16 * K + 7);
      cache->reach_in_stream(*segments[i], page + 1);
    }
    cache->wait();
  }
  CHECK(cache->stats().faults == before.faults);
  CHECK(wrong == 0);
  cache->close_stream(requests);
}

TEST_CASE_FIXTURE(CycleFixture,
                  "a lasting stream has room for its next page without content, though memory is full") {
  make(400 * K, 0);
  make_segments(8, 100 * K);
  const auto fresh = segment(100 * K);       // no page has content yet
  for (unsigned i = 7; i >= 4; --i) use(i);  // in an order that repeats nothing: the plan knows no next use
  cache->wait();                             // memory is full of clean pages
  const PinRequest requests[] = {{fresh.get(), Access::write}, {segments[0].get(), Access::read}};
  cache->open_stream(requests);
  std::size_t taken = 0;
  for (std::size_t page = 0; page < fresh->pages(); ++page) {
    cache->wait();
    PagePin pin = cache->try_pin_page(*fresh, page, Access::write, /*is_brief=*/true);
    if (!pin || !pin.try_wait()) break;
    ++taken;
    for (auto* const member : {fresh.get(), segments[0].get()}) cache->reach_in_stream(*member, page + 1);
  }
  CHECK(taken == fresh->pages());
  cache->close_stream(requests);
}

TEST_CASE_FIXTURE(CycleFixture, "a lasting stream begins where its walk has stopped before") {
  make(400 * K, 0);
  make_segments(8, 320 * K);
  for (auto& segment : segments) cache->evict(*segment);
  cache->wait();
  const PinRequest request{segments[0].get(), Access::read};
  cache->open_stream({&request, 1});
  const std::size_t late = segments[0]->pages() - 1;
  cache->reach_in_stream(*segments[0], late);
  use(7);  // a page that is let go of starts reads
  cache->wait();
  PagePin pin = cache->try_pin_page(*segments[0], late, Access::read, /*is_brief=*/true);
  CHECK((pin && pin.try_wait()));
  pin = {};
  cache->close_stream({&request, 1});
}

TEST_CASE_FIXTURE(CycleFixture, "a lasting stream gives up reads that fail, and the use of the page has the error") {
  make(400 * K, 0, 16 * K, /*failing=*/true);
  make_segments(12, 320 * K);
  for (auto& segment : segments) cache->evict(*segment);
  cache->wait();
  std::atomic<int> reads = 0;
  io->set_outcome(
      [&](const Transfer& t) { return t.direction == Direction::read ? ++reads, -static_cast<long>(EIO) : 1L; });
  const PinRequest requests[] = {{segments[0].get(), Access::read}, {segments[1].get(), Access::write}};
  cache->open_stream(requests);
  cache->wait();
  CHECK(reads > 0);
  CHECK(reads <= 100);
  CHECK_THROWS_AS(cache->pin_page(*segments[0], 0, Access::read).wait(), DiskError);
  io->set_outcome([](const Transfer&) { return 1L; });
  for (unsigned i = 0; i < segments.size(); ++i) use(i);
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(CycleFixture,
                  "one operator gets the error of a read ahead, though other reads of the frame are slow") {
  make(64 * K, 64 * K, 4 * kBlockBytes, /*failing=*/true);
  make_segments(6, 30 * K);
  cycle(), cycle();
  cache->wait();
  for (auto& s : segments) cache->evict(*s);
  std::atomic<int> reads = 0;
  io->set_outcome([&](const Transfer& t) {
    const int read = t.direction == Direction::read ? ++reads : 0;
    if (read == 3) return -static_cast<long>(EIO);  // the first page that is read ahead
    if (read == 4) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return 1L;
  });
  use(0);
  for (int i = 0; i < 1000 && reads < 4; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(reads.load() >= 4);
  CHECK_THROWS_AS(use(1), DiskError);
  CHECK_NOTHROW(use(1));
  io->set_outcome([](const Transfer&) { return 1L; });  // reads that go on after this must not count here
  for (unsigned i = 0; i < segments.size(); ++i) use(i);
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(CycleFixture, "a lasting stream ends with its segments, and gives way to what is used") {
  make(200 * K, 0);
  make_segments(4, 100 * K);
  for (int again = 0; again < 2; ++again) {  // opened anew without being closed
    const PinRequest requests[] = {{segments[3].get(), Access::write}, {segments[2].get(), Access::read}};
    cache->open_stream(requests);
    cache->wait();
    use(0), use(1);
  }
  segments.pop_back();
  for (int i = 0; i < 3; ++i) cycle();
  const PinRequest gone{segments[2].get(), Access::read};
  cache->close_stream({&gone, 1});
  segments.pop_back();
  cycle();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(CycleFixture, "a read starts when a transfer ends, while no thread waits") {
  make(64 * K, 64 * K, 4 * kBlockBytes, /*failing=*/true);
  make_segments(6, 30 * K);
  cycle(), cycle();
  cache->wait();
  for (auto& s : segments) cache->evict(*s);
  const int reads = io->reads;
  use(0);
  cache->wait();
  CHECK(io->reads >= reads + 4);  // the pages of two segments
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(CycleFixture, "what cannot be read ahead for want of memory is not waited for") {
  make(64 * K, 64 * K, 4 * kBlockBytes, /*failing=*/true);
  make_segments(4, 60 * K);
  cycle(), cycle();
  cache->wait();
  io->stall(true);  // no write and no read ends: pins of what is in memory go on
  unsigned resident = 0;
  while (resident < 4 && !cache->resident(*segments[resident])) ++resident;
  REQUIRE(resident < 4);
  const PinRequest request{segments[resident].get(), Access::read};
  CHECK(cache->usage(Pool::device).now + cache->usage(Pool::host).now <= 128 * K);
  io->stall(false);
  cache->pin({&request, 1});
  cache->unpin({&request, 1});
}

TEST_CASE_FIXTURE(CycleFixture,
                  "a prefetch that fails is read again when it is needed, and its error surfaces then") {
  make(100 * K, 150 * K, 4 * kBlockBytes, /*failing=*/true);
  make_segments(4, 60 * K);
  cycle(), cycle();
  cache->wait();
  // Room that one segment leaves may be used to read another ahead.
  std::atomic<bool> first = false;
  io->set_outcome([&](const Transfer& t) {
    const bool fails = t.direction == Direction::read && !first.exchange(false);
    return fails ? -static_cast<long>(EIO) : 1L;
  });
  for (auto& s : segments) cache->evict(*s);
  cache->wait();
  first = true;
  const PinRequest zeroth{segments[0].get(), Access::read};
  CHECK_THROWS_AS(cache->pin({&zeroth, 1}), DiskError);  // of its pages, all but the first fail
  CHECK_FALSE(cache->resident(*segments[0]));
  CHECK_THROWS_AS(use(1), DiskError);
  cache->wait();
  CHECK(cache->usage(Pool::device).now + cache->usage(Pool::host).now == 0);
  io->set_outcome([](const Transfer&) { return 1L; });
  cycle();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(CycleFixture, "the page that is used last leaves, not the one that was used longest ago") {
  make(250 * K, 0);
  make_segments(12, 40 * K);  // six fit
  for (int i = 0; i < 4; ++i) cycle();
  cache->wait();
  const auto before = cache->stats();
  for (int i = 0; i < 8; ++i) cycle(), cache->wait();
  // Least recently used would read all twelve in each cycle; the best that is not read ahead is 6.5.
  CHECK(cache->stats().read_bytes - before.read_bytes <= 8 * 8 * 40 * K);
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(CycleFixture, "a page of a segment that is being read whole can be written") {
  make(100 * K, 150 * K, 4 * kBlockBytes, /*failing=*/true);
  make_segments(3, 60 * K);
  cycle(), cycle();
  cache->wait();
  for (auto& s : segments) cache->evict(*s);
  use(0);
  {
    PagePin page = cache->pin_page(*segments[1], 3, Access::write);
    page.wait();
    CHECK(page.data()[5] == pattern(1, 3 * segments[1]->page_bytes() + 5));
    page.data()[5] = pattern(1, 3 * segments[1]->page_bytes() + 5);
  }
  cache->evict(*segments[1]);
  CHECK(holds(*segments[1], 1));
}

TEST_CASE_FIXTURE(CacheFixture, "a page that was to be overwritten and was not keeps its content") {
  make(128 * K, 128 * K, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(100 * K), b = segment(100 * K);
  write(*a, 1), write(*b, 2);
  cache->evict(*a), cache->evict(*b);
  io->set_outcome([](const Transfer& t) { return t.direction == Direction::read ? -static_cast<long>(EIO) : 1L; });
  {
    PagePin target = cache->pin_page(*a, 1, Access::overwrite), source = cache->pin_page(*b, 1, Access::read);
    CHECK_THROWS_AS(source.wait(), DiskError);  // before the target was opened for writing
  }
  const PinRequest both[] = {{a.get(), Access::overwrite}, {b.get(), Access::read}};
  CHECK_THROWS_AS(cache->pin({both, 2}), BudgetError);
  auto c = segment(20 * K);
  write(*c, 3);
  cache->evict(*c);
  const PinRequest fits[] = {{a.get(), Access::overwrite}, {c.get(), Access::read}};
  CHECK_THROWS_AS(cache->pin({fits, 2}), DiskError);
  io->set_outcome([](const Transfer&) { return 1L; });
  CHECK(holds(*a, 1));
  CHECK(holds(*b, 2));
  CHECK(holds(*c, 3));
}

TEST_CASE_FIXTURE(CycleFixture, "what is large for the time before it is read longer ahead") {
  constexpr std::size_t M = kMiB;
  make(40 * M, 8 * M, 4 * M, /*failing=*/true);
  auto pauses = std::make_shared<std::atomic<bool>>(true);
  auto large_reads = std::make_shared<std::atomic<int>>(0);  // requests of 1 MiB
  io->set_outcome([=](const Transfer& t) {
    if (t.direction == Direction::write) return 1L;
    *large_reads += t.bytes == 4 * M;
    if (*pauses) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return 1L;
  });
  auto large = segment(80 * M), other = segment(32 * M);
  for (unsigned i = 0; i < 14; ++i) segments.push_back(segment(3 * M));
  write(*other, 1);
  for (auto& s : segments) write(*s, 1);
  for (std::size_t page = 0; page < large->pages(); ++page) {
    PagePin pin = cache->pin_page(*large, page, Access::overwrite);
    pin.wait();
    std::memset(pin.data(), 1, large->bytes_of(page));
  }
  cache->evict(*other);
  CHECK(holds(*other, 1));  // enough at once to see how fast the disk is
  const PinRequest all{large.get(), Access::read};
  int most = 0;
  for (int cycle = 0; cycle < 8; ++cycle) {
    *large_reads = 0;
    for (unsigned i = 0; i < segments.size(); ++i) {
      const PinRequest small{segments[i].get(), Access::read};
      cache->pin({&small, 1});
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      cache->unpin({&small, 1});
    }
    if (cycle >= 4) most = std::max(most, large_reads->load());
    cache->announce({&all, 1});
    for (std::size_t page = 0; page < large->pages(); ++page) cache->pin_page(*large, page, Access::read).wait();
  }
  *pauses = false;
  CHECK(most >= 12);  // with the window alone, 8
}

TEST_CASE_FIXTURE(CycleFixture,
                  "writes that failed for a moment do not end reading ahead, and are forgotten once done") {
  make(400 * K, 0, 16 * K, /*failing=*/true);
  make_segments(8, 100 * K);
  const auto faults_in_a_cycle = [&] {
    const std::size_t before = cache->stats().faults;
    for (unsigned i = 0; i < segments.size(); ++i) {
      use(i, Access::write);
      cache->wait();
    }
    return cache->stats().faults - before;
  };
  const std::size_t without_reading_ahead = faults_in_a_cycle();
  // On a busy machine some cycles have more faults than others, and after a cycle that an error cut short the plan
  // has to learn them anew.
  const auto reads_ahead = [&] {
    for (int i = 0; i < 50; ++i) {
      if (faults_in_a_cycle() < without_reading_ahead / 2) return true;
    }
    return false;
  };
  REQUIRE(reads_ahead());
  std::atomic<int> failures = 3;
  io->set_outcome([&](const Transfer& t) {
    return t.direction == Direction::write && failures-- > 0 ? -static_cast<long>(EIO) : 1L;
  });
  for (int i = 0, after = 0; after < 3 && i < 100; ++i) {
    after += failures <= 0;
    try {
      for (unsigned k = 0; k < segments.size(); ++k) use(k, Access::write);
    } catch (const DiskError&) {  // a thread that needed the memory gets the error, perhaps a cycle later
    }
  }
  REQUIRE(failures <= 0);
  try {
    cache->wait();
  } catch (const DiskError&) {  // told of once
  }
  CHECK(reads_ahead());
  cache->wait();  // all pages have been written since
  CHECK(wrong == 0);
}
