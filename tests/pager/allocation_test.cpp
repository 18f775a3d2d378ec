// Every allocation of a short program fails once. The operation that meets it throws std::bad_alloc, and succeeds
// when it is called again.
#include <doctest/doctest.h>

#include <new>
#include <vector>

#include "cache_fixture.h"
#include "memory_shortage.h"
#include "queued_device.h"
#include "zeropage/pager/foresight/timeline.h"

using namespace zeropage;

namespace {

struct Program : CacheFixture {
  static constexpr std::size_t kSegments = 4;
  std::vector<std::unique_ptr<TestSegment>> segments{kSegments};
  std::vector<std::unique_ptr<TestSegment>> short_lived;
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
    overwrite(1, 41);
    FrozenSegment frozen;
    survive([&] { frozen = cache->freeze(*segments[1]); });
    overwrite(1, 42);
    for (std::size_t page = 0; page < frozen.pages(); ++page) {
      survive([&] { wrong += !save_page(frozen, page, 41); });
    }
    frozen = {};
    // Homes in memory, and small tensors that share a page, which die.
    for (const Tier tier : {Tier::host, Tier::disk}) {
      for (const std::size_t bytes : {20 * K, 100 * std::size_t{1}, 200 * std::size_t{1}}) {
        survive([&] {
          auto made = std::make_unique<TestSegment>();
          cache->bind(*made, {bytes, 0, Role::gradient, tier});
          short_lived.push_back(std::move(made));
        });
      }
    }
    for (int round = 0; round < 2; ++round) {
      for (auto& one : short_lived) survive([&] { write(*one, 5); });
      for (auto& one : short_lived) {
        survive([&] { wrong += !holds(*one, 5); });
      }
    }
    short_lived.clear();
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
    segments.clear();
    // With a device's memory apart, pages pass through the host's.
    auto host = segment((cache->has_separate_memory() ? 40 : 60) * K, Role::parameter, Tier::host);
    auto large = segment(96 * K);
    write(*host, 6);
    write(*large, 7);
    CHECK(holds(*large, 7));
    CHECK(holds(*host, 6));
  }

  std::size_t wrong = 0;
};

}  // namespace

namespace {

/// `apart`: on a device with memory of its own.
void fail_each_allocation(bool apart) {
#if defined(__SANITIZE_THREAD__)
  const std::size_t each = apart ? 101 : 11;  // each one takes minutes there
#else
  const std::size_t each = apart ? 5 : 1;
#endif
  bool failed = true;
  std::size_t number = 0, met = 0;
  for (; failed; number += each) {
    CAPTURE(number);
    Program program;
    const auto device = apart ? std::make_shared<QueuedDevice>(96 * K) : nullptr;
    if (device) device->runs_operators_at_once = true;
    program.make(96 * K, 64 * K, 4 * kBlockBytes, /*failing=*/false, device);
    {
      const FailingAllocation failing(number);
      program.run();
      failed = FailingAllocation::has_failed();
    }
    met += program.thrown > 0;
    program.check();
  }
  CHECK(number > 100);
  CHECK(met > 500 / each);
}

}  // namespace

TEST_CASE("an allocation that fails at any point leaves the cache whole") { fail_each_allocation(/*apart=*/false); }

TEST_CASE("an allocation that fails at any point leaves the caches of a device whole") {
  fail_each_allocation(/*apart=*/true);
}
