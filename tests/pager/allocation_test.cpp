// Every allocation of a short program fails once. The operation that meets it throws std::bad_alloc, and succeeds
// when it is called again.
#include <doctest/doctest.h>

#include <new>
#include <vector>

#include "cache_fixture.h"
#include "memory_shortage.h"
#include "zeropage/pager/foresight/timeline.h"

using namespace zeropage;

namespace {

struct Program : CacheFixture {
  static constexpr std::size_t kSegments = 4;
  std::vector<std::unique_ptr<TestSegment>> segments{kSegments};
  std::vector<unsigned> seeds = std::vector<unsigned>(kSegments, 0);
  std::vector<bool> is_zero = std::vector<bool>(kSegments, true);
  int thrown = 0;

  /// Runs the operation again while an allocation fails in it.
  template <class Operation>
  void survive(Operation operation) {
    while (true) {
      try {
        return operation();
      } catch (const std::bad_alloc&) {
        ++thrown;
        REQUIRE(thrown < 4);  // a failure may come on a transfer's thread, and again at its retry
      }
    }
  }

  void run() {
    for (std::size_t i = 0; i < kSegments; ++i) {
      survive([&] {
        auto made = std::make_unique<TestSegment>();
        cache->bind(*made, {60 * K, 0, Role::parameter, Tier::disk});
        segments[i] = std::move(made);
      });
    }
    for (unsigned round = 1; round < 4; ++round) {
      for (unsigned i = 0; i < kSegments; ++i) overwrite(i, 10 * round + i);
      for (unsigned i = 0; i < kSegments; ++i) add_by_pages(i);
    }
    survive([&] { cache->zero(*segments[0]); });
    is_zero[0] = true;
    for (auto& one : segments) survive([&] { cache->evict(*one); });
    survive([&] { cache->wait(); });
  }

  void overwrite(unsigned i, unsigned seed) {
    survive([&] { write(*segments[i], seed); });
    seeds[i] = seed, is_zero[i] = false;
  }

  /// A walk over pages, which writes what is there.
  void add_by_pages(unsigned i) {
    TestSegment& one = *segments[i];
    const PinRequest request{&one, Access::write};
    survive([&] { cache->announce({&request, 1}); });
    for (std::size_t page = 0; page < one.pages(); ++page) {
      survive([&] {
        PagePin pin = cache->pin_page(one, page, Access::write);
        pin.wait();
        for (std::size_t j = 0; j < one.bytes_of(page); j += 512) {
          wrong += pin.data()[j] != pattern(seeds[i], page * one.page_bytes() + j);
        }
      });
    }
  }

  /// Without failures: whether the content is right, and the cache can go on.
  void check() {
    for (unsigned i = 0; i < kSegments; ++i) {
      if (!segments[i]) continue;
      if (is_zero[i]) {
        const PinRequest request{segments[i].get(), Access::read};
        cache->pin({&request, 1});
        for (std::size_t j = 0; j < segments[i]->bytes(); ++j) wrong += segments[i]->data[j] != std::byte{0};
        cache->unpin({&request, 1});
      } else {
        CHECK(holds(*segments[i], seeds[i]));
      }
    }
    CHECK(wrong == 0);
    for (unsigned i = 0; i < kSegments; ++i) {
      write(*segments[i], 100 + i);
      CHECK(holds(*segments[i], 100 + i));
    }
    cache->wait();
    // All of the budget can still be used at once.
    auto large = segment(90 * K);
    write(*large, 7);
    CHECK(holds(*large, 7));
  }

  std::size_t wrong = 0;
};

}  // namespace

TEST_CASE("an allocation that fails at any point leaves the cache whole") {
#if defined(__SANITIZE_THREAD__)
  constexpr std::size_t kEach = 11;  // each one takes minutes there
#else
  constexpr std::size_t kEach = 1;
#endif
  bool failed = true;
  std::size_t number = 0, met = 0;
  for (; failed; number += kEach) {
    CAPTURE(number);
    Program program;
    program.make(96 * K, 64 * K);
    {
      const FailingAllocation failing(number);
      program.run();
      failed = FailingAllocation::has_failed();
    }
    met += program.thrown > 0;
    program.check();
  }
  CHECK(number > 100);
  CHECK(met > 500 / kEach);
}
