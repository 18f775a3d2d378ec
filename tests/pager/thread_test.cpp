#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
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

TEST_CASE_FIXTURE(CacheFixture,
                  "an operator waits for another's pins, however long it takes, and evicts nothing meanwhile") {
  memory_timeout = std::chrono::milliseconds(20);  // for lasting pins alone
  make(256 * K, 1024 * K, 4 * kBlockBytes, /*failing=*/true);
  auto a = segment(160 * K), b = segment(160 * K), other = segment(200 * K);
  write(*other, 3), write(*a, 1), write(*b, 2);
  const PinRequest first{a.get(), Access::read}, second{b.get(), Access::read};
  cache->pin({&first, 1});
  const int written = io->writes;
  std::atomic<bool> let_go{false}, wrong{false};
  std::thread thread([&] {
    cache->pin({&second, 1});
    wrong = !let_go;
    cache->unpin({&second, 1});
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  let_go = true;
  cache->unpin({&first, 1});
  thread.join();
  CHECK_FALSE(wrong);
  CHECK(io->writes == written);
  CHECK(cache->resident(*other));
}

TEST_CASE_FIXTURE(CacheFixture, "a lasting pin of another thread ends a wait with an error that names the setting") {
  memory_timeout = std::chrono::milliseconds(20);
  make(256 * K, 256 * K);
  auto a = segment(200 * K), b = segment(200 * K);
  const PinRequest first{a.get(), Access::read}, second{b.get(), Access::read};
  const PinOptions lasting{.lasting = true};
  cache->pin({&first, 1}, lasting);
  std::thread([&] {
    CHECK_THROWS_WITH_AS(cache->pin({&second, 1}), doctest::Contains("memory_timeout"), BudgetError);
  }).join();
  CHECK_THROWS_AS(cache->pin({&second, 1}), BudgetError);  // at once: its own thread cannot let go meanwhile
  cache->unpin({&first, 1}, lasting);
  CHECK(holds(*b, 0) == false);
}

TEST_CASE_FIXTURE(CacheFixture, "a large operator is served while a thread streams pages without end") {
  make(256 * K, 256 * K);
  auto large = segment(250 * K), stream = segment(2048 * K);
  write(*large, 1);
  cache->evict(*large);
  std::atomic<bool> done{false};
  std::atomic<int> pages{0};
  std::thread thread([&] {
    for (std::size_t i = 0; !done; i = (i + 1) % stream->pages(), ++pages) {
      PagePin page = cache->pin_page(*stream, i, Access::write);
      page.wait();
    }
  });
  while (pages < 300) std::this_thread::yield();
  const int before = pages;
  CHECK(holds(*large, 1));
  CHECK(pages - before < 1000);
  done = true;
  thread.join();
}

TEST_CASE_FIXTURE(CacheFixture, "two threads that walk over pages and assemble tensors under one's memory both end") {
  make(192 * K, 64 * K);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      auto weight = segment(150 * K), state = segment(150 * K);
      write(*weight, t);
      for (int round = 0; round < 50; ++round) {
        const PinRequest walk[] = {{weight.get(), Access::read}, {state.get(), Access::write}};
        {
          const MemoryClaim claim = cache->claim(walk);
          for (std::size_t i = 0; i < weight->pages(); ++i) {
            PagePin from = cache->pin_page(*weight, i, Access::read), to = cache->pin_page(*state, i, Access::write);
            from.wait(), to.wait();
            std::copy(from.data(), from.data() + weight->bytes_of(i), to.data());
          }
        }
        wrong += !holds(*state, t) || !holds(*weight, t);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(CacheFixture,
                  "what memory can never hold is refused at once, though another thread still uses memory") {
  make(256 * K, 64 * K);
  auto small = segment(100 * K), large = segment(300 * K), a = segment(140 * K), b = segment(140 * K);
  const PinRequest first{small.get(), Access::read}, too_large{large.get(), Access::read};
  const PinRequest together[] = {{a.get(), Access::read}, {b.get(), Access::read}};
  cache->pin({&first, 1});
  std::thread([&] {  // which would wait for this thread's pin, and this thread for it
    CHECK_THROWS_AS(cache->pin({&too_large, 1}), BudgetError);
    CHECK_THROWS_AS(cache->pin(together), BudgetError);
  })
      .join();
  cache->unpin({&first, 1});
}

TEST_CASE_FIXTURE(CacheFixture, "zeros stay although another thread joins the pages in one frame meanwhile") {
  make(24 * 1024 * K, 0, 256 * K);
  for (int round = 0; round < 60; ++round) {
    auto a = segment(8 * 1024 * K);
    for (std::size_t page = 0; page < 32; ++page) {
      PagePin pin = cache->pin_page(*a, page, Access::overwrite);
      pin.wait();
      std::memset(pin.data(), 7, 256 * K);
    }
    const PinRequest request{a.get(), Access::read};
    std::thread other([&] {
      cache->pin({&request, 1});
      cache->unpin({&request, 1});
    });
    std::this_thread::sleep_for(std::chrono::microseconds(round * 50));
    cache->zero(*a);
    other.join();
    for (std::size_t page = 0; page < 32; ++page) {
      PagePin pin = cache->pin_page(*a, page, Access::read);
      pin.wait();
      const bool is_zero =
          std::all_of(pin.data(), pin.data() + 256 * K, [](std::byte b) { return b == std::byte{0}; });
      REQUIRE(is_zero);
    }
  }
}
