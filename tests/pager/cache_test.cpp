#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "memory_shortage.h"
#include "pager/cache_fixture.h"
#include "zeropage/base/errors.h"
#include "zeropage/pager/frame_cache.h"

using namespace zeropage;

TEST_CASE_FIXTURE(CacheFixture, "a small tensor reads as zeros where a dead one was on the shared page") {
  make(1 << 20, 1 << 20);
  auto neighbour = segment(100), dead = segment(100);
  write(*neighbour, 1);
  write(*dead, 2);
  dead.reset();
  auto created = segment(100);
  const PinRequest request{created.get(), Access::read};
  cache->pin({&request, 1});
  CHECK(std::all_of(created->data, created->data + 100, [](std::byte b) { return b == std::byte{0}; }));
  cache->unpin({&request, 1});
  CHECK(holds(*neighbour, 1));
}

TEST_CASE_FIXTURE(CacheFixture, "a home that its maker overwrites gets no zeros, except where tensors share a page") {
  make(1 << 20, 1 << 20);
  const auto hundredth_byte = [&](const TestSegment& of) {
    const PinRequest request{const_cast<TestSegment*>(&of), Access::read};
    cache->pin({&request, 1});
    const std::byte byte = of.data[99];
    cache->unpin({&request, 1});
    return byte;
  };
  const auto bind = [&](std::size_t bytes, bool is_unset) {
    auto made = std::make_unique<TestSegment>();
    cache->bind(*made, {bytes, 0, Role::activation, Tier::host, 0, false, false, {}, is_unset});
    return made;
  };
  auto large = bind(300 * K, false);
  write(*large, 7);
  const std::byte before = hundredth_byte(*large);  // not zero
  REQUIRE(before != std::byte{0});
  large.reset();
  large = bind(300 * K, true);
  CHECK(hundredth_byte(*large) == before);  // the same memory
  large.reset();
  CHECK(hundredth_byte(*bind(100, true)) == std::byte{0});
  CHECK(hundredth_byte(*bind(300 * K, false)) == std::byte{0});
}

TEST_CASE_FIXTURE(CacheFixture,
                  "a new segment reads as zeros and touches neither memory nor disk before it is used") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  CHECK(cache->usage(Pool::device).now == 0);
  const PinRequest request{a.get(), Access::read};
  cache->pin({&request, 1});
  for (std::size_t i = 0; i < a->bytes(); ++i) CHECK(a->data[i] == std::byte{0});
  cache->unpin({&request, 1});
  CHECK(cache->stats().read_bytes == 0);
  CHECK(a->data == nullptr);
}

TEST_CASE_FIXTURE(CacheFixture, "more data than memory comes back as it was written, and no budget is passed") {
  make(256 * K, 128 * K);
  std::vector<std::unique_ptr<TestSegment>> segments;
  for (unsigned i = 0; i < 40; ++i) {
    segments.push_back(segment(10 * K + i * 3000));
    write(*segments.back(), i);
  }
  for (unsigned round = 0; round < 2; ++round) {
    for (unsigned i = 0; i < 40; ++i) CHECK(holds(*segments[i], i));
  }
  CHECK(cache->usage(Pool::device).peak <= 256 * K);
  CHECK(cache->usage(Pool::host).peak <= 128 * K);
  CHECK(cache->stats().evictions > 0);
}

TEST_CASE_FIXTURE(CacheFixture, "only dirty pages are written") {
  make(256 * K, 0);
  auto a = segment(200 * K), b = segment(200 * K);
  write(*a, 1);
  cache->evict(*a);
  const std::size_t written = cache->stats().written_bytes;
  CHECK(written == 200 * K);
  for (int i = 0; i < 3; ++i) {
    CHECK(holds(*a, 1));
    cache->evict(*a);
  }
  CHECK(cache->stats().written_bytes == written);
  // One page of a written: one page goes to the disk.
  {
    PagePin page = cache->pin_page(*a, 2, Access::write);
    page.wait();
    page.data()[0] = std::byte{9};
  }
  cache->evict(*a);
  CHECK(cache->stats().written_bytes == written + 16 * K);
}

TEST_CASE_FIXTURE(CacheFixture, "small segments share a page, large ones have pages of their own") {
  make(256 * K, 0);
  std::vector<std::unique_ptr<TestSegment>> small;
  for (unsigned i = 0; i < 4; ++i) {
    small.push_back(segment(700));
    write(*small[i], i);
  }
  for (unsigned i = 0; i < 4; ++i) CHECK(holds(*small[i], i));
  CHECK(cache->stats().home_bytes[0][static_cast<int>(Tier::disk)] == 4 * K);
  small.erase(small.begin() + 1);
  auto again = segment(700);  // takes the dead one's place
  CHECK(cache->stats().home_bytes[0][static_cast<int>(Tier::disk)] == 4 * K);
  cache->zero(*again);
  CHECK(holds(*small[0], 0));
  CHECK(holds(*small[1], 2));
}

TEST_CASE_FIXTURE(CacheFixture, "pages written one by one are whole when an operator needs the tensor whole") {
  make(256 * K, 128 * K);
  auto a = segment(120 * K);
  for (std::size_t i = 0; i < a->pages(); ++i) {
    PagePin page = cache->pin_page(*a, i, Access::overwrite);
    page.wait();
    for (std::size_t j = 0; j < a->bytes_of(i); ++j) page.data()[j] = pattern(5, i * a->page_bytes() + j);
  }
  CHECK(holds(*a, 5));
  cache->evict(*a);
  CHECK(holds(*a, 5));
}

TEST_CASE_FIXTURE(CacheFixture, "zeroing needs no transfer and holds after eviction") {
  make(256 * K, 0);
  auto a = segment(200 * K);
  write(*a, 1);
  cache->evict(*a);
  const auto before = cache->stats();
  cache->zero(*a);
  const PinRequest request{a.get(), Access::read};
  cache->pin({&request, 1});
  for (std::size_t i = 0; i < a->bytes(); ++i) REQUIRE(a->data[i] == std::byte{0});
  cache->unpin({&request, 1});
  CHECK(cache->stats().read_bytes == before.read_bytes);
}

TEST_CASE_FIXTURE(CacheFixture,
                  "an operator that needs more than the budget is refused with sizes, and nothing changes") {
  make(128 * K, 64 * K);
  auto a = segment(100 * K), b = segment(100 * K);
  write(*a, 1);
  write(*b, 2);
  const PinRequest both[] = {{a.get(), Access::read}, {b.get(), Access::read}};
  CHECK_THROWS_WITH_AS(cache->pin(both), doctest::Contains("device_memory = 131.1 kB"), BudgetError);
  CHECK(holds(*a, 1));
  CHECK(holds(*b, 2));
}

TEST_CASE_FIXTURE(CacheFixture, "an operator that fits exactly is served however memory was cut up before") {
  make(256 * K, 0);
  std::vector<std::unique_ptr<TestSegment>> segments;
  for (unsigned i = 0; i < 30; ++i) {
    segments.push_back(segment(16 * K + (i % 5) * 12 * K));
    write(*segments[i], i);
  }
  auto a = segment(124 * K), b = segment(128 * K);
  write(*a, 100);
  CHECK(holds(*segments[3], 3));
  write(*b, 101);
  CHECK(holds(*segments[4], 4));
  const PinRequest both[] = {{a.get(), Access::read}, {segments[4].get(), Access::read}, {b.get(), Access::read}};
  cache->evict(*segments[4]);
  cache->pin({both, 1});
  cache->unpin({both, 1});
  const PinRequest exact[] = {{a.get(), Access::read}, {b.get(), Access::read}};
  cache->pin(exact);
  CHECK(a->data[77] == pattern(100, 77));
  CHECK(b->data[77] == pattern(101, 77));
  cache->unpin(exact);
}

TEST_CASE_FIXTURE(CacheFixture, "holes between frames become one without a transfer") {
  make(256 * K, 0);
  std::vector<std::unique_ptr<TestSegment>> segments;
  for (unsigned i = 0; i < 16; ++i) {
    segments.push_back(segment(16 * K));
    write(*segments[i], i);
  }
  for (unsigned i = 0; i < 16; i += 2) segments[i].reset();
  cache->wait();
  const auto before = cache->stats();
  auto large = segment(120 * K);  // 128 are free, 16 at a place
  write(*large, 100);
  CHECK(cache->stats().evictions == before.evictions);
  CHECK(cache->stats().read_bytes == before.read_bytes);
  for (unsigned i = 1; i < 16; i += 2) CHECK(holds(*segments[i], i));
  CHECK(holds(*large, 100));
}

TEST_CASE_FIXTURE(CacheFixture, "a segment may be named twice in one operator and pinned inside a pin") {
  make(256 * K, 0);
  auto a = segment(100 * K);
  write(*a, 3);
  const PinRequest twice[] = {{a.get(), Access::read}, {a.get(), Access::write}};
  cache->pin(twice);
  CHECK(holds(*a, 3));
  CHECK(a->data != nullptr);
  cache->evict(*a);  // pinned: stays
  CHECK(a->data[5] == pattern(3, 5));
  cache->unpin(twice);
  CHECK(a->data == nullptr);
}

TEST_CASE_FIXTURE(CacheFixture, "host and device homes stay in memory and are paid for by their tier's budget") {
  make(256 * K, 256 * K);
  auto device = segment(100 * K, Role::parameter, Tier::device), host = segment(90 * K, Role::optimizer, Tier::host);
  CHECK(cache->usage(Pool::device).now == 100 * K);
  CHECK(cache->usage(Pool::host).now == 92 * K);  // whole blocks
  write(*device, 1);
  write(*host, 2);
  cache->evict(*device);
  cache->evict(*host);
  CHECK(holds(*device, 1));
  CHECK(holds(*host, 2));
  CHECK(cache->stats().written_bytes == 0);
  CHECK_THROWS_WITH_AS(segment(200 * K, Role::parameter, Tier::host), doctest::Contains("raise host_memory"),
                       BudgetError);
  host.reset();
  CHECK(cache->usage(Pool::host).now == 0);
}

TEST_CASE_FIXTURE(CacheFixture, "evicted device frames are written behind while the host has memory") {
  make(64 * K, 512 * K);
  std::vector<std::unique_ptr<TestSegment>> segments;
  for (unsigned i = 0; i < 8; ++i) {
    segments.push_back(segment(60 * K));
    write(*segments[i], i);
  }
  // All eight are in memory still: one in a frame, seven in the host's cache.
  CHECK(cache->stats().evictions == 0);
  const std::size_t read = cache->stats().read_bytes;
  for (unsigned i = 0; i < 8; ++i) CHECK(holds(*segments[i], i));
  CHECK(cache->stats().read_bytes == read);
}

TEST_CASE_FIXTURE(CacheFixture, "after close every use is refused and nothing is left on the disk") {
  make(256 * K, 0);
  auto a = segment(100 * K);
  write(*a, 1);
  cache->close();
  CHECK(directory.empty());
  const PinRequest request{a.get(), Access::read};
  CHECK_THROWS_WITH_AS(cache->pin({&request, 1}), doctest::Contains("space was closed"), AccessError);
  CHECK_THROWS_AS(segment(100), AccessError);
}

TEST_CASE_FIXTURE(CacheFixture, "a forked child is refused, and its exit harms nothing") {
  make(256 * K, 64 * K);
  auto a = segment(200 * K);
  write(*a, 1);
  cache->evict(*a);
  const pid_t child = ::fork();
  if (child == 0) {
    const PinRequest request{a.get(), Access::read};
    bool refused = false;
    try {
      cache->pin({&request, 1});
    } catch (const AccessError&) {
      refused = true;
    }
    a.reset();
    cache.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(holds(*a, 1));
}

TEST_CASE_FIXTURE(CacheFixture, "any mixture of creations, deaths, pins, pages and evictions keeps every byte") {
  make(192 * K, 96 * K, 2 * kBlockBytes);
  std::mt19937 random(11);
  struct Alive {
    std::unique_ptr<TestSegment> segment;
    unsigned seed;
  };
  std::vector<Alive> alive;
  for (unsigned i = 0; i < 4000; ++i) {
    const unsigned what = random() % 10;
    if (alive.size() < 4 || (what == 0 && alive.size() < 60)) {
      alive.push_back({segment(1 + random() % (60 * K), static_cast<Role>(random() % 3)), i});
      write(*alive.back().segment, i);
      continue;
    }
    Alive& one = alive[random() % alive.size()];
    if (what == 1) {
      std::swap(one, alive.back());
      alive.pop_back();
    } else if (what == 2) {
      cache->evict(*one.segment);
    } else if (what == 3) {
      one.seed = i;
      for (std::size_t p = 0; p < one.segment->pages(); ++p) {
        PagePin page = cache->pin_page(*one.segment, p, Access::overwrite);
        page.wait();
        for (std::size_t j = 0; j < one.segment->bytes_of(p); ++j) {
          page.data()[j] = pattern(i, p * one.segment->page_bytes() + j);
        }
      }
    } else if (what == 4) {
      const PinRequest request{one.segment.get(), Access::read};
      cache->announce({&request, 1});
    } else if (what < 7) {
      one.seed = i;
      write(*one.segment, i);
    } else {
      REQUIRE(holds(*one.segment, one.seed));
    }
  }
  for (Alive& one : alive) CHECK(holds(*one.segment, one.seed));
  CHECK(cache->usage(Pool::device).peak <= 192 * K);
  CHECK(cache->usage(Pool::host).peak <= 96 * K);
  alive.clear();
  cache->wait();  // for what was under way to those that died
  CHECK(cache->usage(Pool::device).now == 0);
  CHECK(cache->usage(Pool::host).now == 0);
}

TEST_CASE_FIXTURE(CacheFixture, "pins are let go of, and memory is given back, where the heap gives nothing") {
  make(256 * K, 0);
  auto a = segment(100 * K), b = segment(100 * K), zeros = segment(30 * K);
  write(*a, 1);
  write(*b, 2);
  const PinRequest request{a.get(), Access::write};
  cache->pin({&request, 1});
  PagePin page = cache->pin_page(*b, 0, Access::read), claimed = cache->pin_page(*zeros, 0, Access::overwrite);
  {
    const MemoryShortage shortage;
    cache->unpin({&request, 1});
    page = {};
    claimed = {};
  }
  CHECK_FALSE(cache->resident(*zeros));
  CHECK(holds(*a, 1));
  CHECK(holds(*b, 2));
}
