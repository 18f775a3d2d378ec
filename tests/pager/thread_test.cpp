#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <thread>

#include "pager/cache_fixture.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

TEST_CASE_FIXTURE(CacheFixture, "threads that pin, page and evict at once see their own bytes") {
  make(512 * K, 256 * K, 2 * kBlockBytes);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<std::unique_ptr<TestSegment>> mine;
      for (unsigned i = 0; i < 6; ++i) {
        mine.push_back(segment(10 * K + random() % (80 * K)));
        write(*mine[i], t * 100 + i);
      }
      for (unsigned round = 0; round < 100; ++round) {
        const unsigned i = random() % 6;
        if (round % 3 == 0) cache->evict(*mine[i]);
        const PinRequest request{mine[i].get(), Access::read};
        if (round % 5 == 0) cache->announce({&request, 1});
        wrong += !holds(*mine[i], t * 100 + i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(CacheFixture, "a pin that another thread lets go of is no longer one of the thread that took it") {
  make(256 * K, 0);
  auto a = segment(200 * K), b = segment(200 * K);
  for (int i = 0; i < 2; ++i) {
    PagePin page = cache->pin_page(*a, 0, Access::read);
    std::thread([pin = std::move(page)] {}).join();
  }
  const PinRequest request{a.get(), Access::read};
  std::atomic<bool> pinned{false}, let_go{false};
  std::thread other([&] {
    cache->pin({&request, 1});
    pinned = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    let_go = true;
    cache->unpin({&request, 1});
  });
  while (!pinned) std::this_thread::yield();
  std::vector<PagePin> pages;
  try {
    for (std::size_t page = 0; page < 4; ++page) pages.push_back(cache->pin_page(*b, page, Access::write));
    CHECK(let_go);  // three pages fit next to `a`
  } catch (const BudgetError& error) {
    FAIL_CHECK(std::string(error.what()));
  }
  other.join();
}

TEST_CASE_FIXTURE(CacheFixture, "an operator waits for another thread's rule to let go of its pages") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  write(*a, 1);
  cache->evict(*a);
  std::atomic<bool> let_go{false};
  PagePin page = cache->pin_page(*a, 1, Access::read);
  page.wait();
  std::thread other([&] {
    CHECK(holds(*a, 1));
    CHECK(let_go);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  let_go = true;
  page = {};
  other.join();
}
