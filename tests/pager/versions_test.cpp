#include <doctest/doctest.h>
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <thread>
#include <vector>

#include "pager/cache_fixture.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

namespace {

struct VersionsFixture : CacheFixture {
  /// A segment of 100 KiB, in pages of 16, that is at home.
  std::unique_ptr<TestSegment> at_home(unsigned seed) {
    auto made = segment(100 * K);
    write(*made, seed);
    cache->evict(*made);
    return made;
  }
  /// Writes the second version, from page `begin` to page `end`.
  void write_pages(TestSegment& s, unsigned seed, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      PagePin pin = cache->pin_page(s, i, Access::write);
      pin.wait();
      for (std::size_t k = 0; k < s.bytes_of(i); ++k) pin.data()[k] = pattern(seed, i * s.page_bytes() + k);
    }
  }
  bool commit(TestSegment& s) {
    Segment* const segments[] = {&s};
    return cache->commit_versions(segments);
  }
};

}  // namespace

TEST_CASE_FIXTURE(VersionsFixture, "a version that is discarded leaves what was, wherever the new pages are") {
  make(256 * K, 256 * K);
  for (const bool evicts : {false, true}) {
    for (const std::size_t written : {0, 1, 4, 7}) {
      auto a = at_home(1);
      REQUIRE(cache->open_version(*a, /*write_first=*/false));
      write_pages(*a, 2, 0, written);
      if (evicts) cache->evict(*a);
      cache->discard_version(*a);
      CHECK(holds(*a, 1));
      cache->evict(*a);
      CHECK(holds(*a, 1));
    }
  }
}

TEST_CASE_FIXTURE(VersionsFixture, "a version that is committed is the content, wherever its pages are") {
  make(256 * K, 256 * K);
  for (const bool evicts_before : {false, true}) {
    auto a = at_home(1);
    const std::uint64_t before = cache->changes(*a);
    REQUIRE(cache->open_version(*a, false));
    write_pages(*a, 2, 0, a->pages());
    if (evicts_before) cache->evict(*a);
    REQUIRE(commit(*a));
    CHECK(cache->changes(*a) != before);
    CHECK(holds(*a, 2));
    cache->evict(*a);
    CHECK(holds(*a, 2));
    write(*a, 3);
    cache->evict(*a);
    CHECK(holds(*a, 3));
  }
}

TEST_CASE_FIXTURE(VersionsFixture, "versions go on from one another, and take twice the space once") {
  make(256 * K, 256 * K);
  auto a = at_home(0);
  std::size_t bytes = 0;
  for (unsigned i = 1; i < 200; ++i) {
    REQUIRE(cache->open_version(*a, /*write_first=*/true));
    write_pages(*a, i, 0, a->pages());
    if (i % 3 == 0) {
      cache->discard_version(*a);
      CHECK(holds(*a, i - 1));
      write(*a, i);
    } else {
      REQUIRE(commit(*a));
    }
    CHECK(holds(*a, i));
    if (i == 10) bytes = cache->swap_bytes();
  }
  CHECK(cache->swap_bytes() == bytes);
}

TEST_CASE_FIXTURE(VersionsFixture, "none of several versions is taken if one was not written whole") {
  make(256 * K, 512 * K);
  auto a = at_home(1), b = at_home(2);
  REQUIRE(cache->open_version(*a, false));
  REQUIRE(cache->open_version(*b, false));
  write_pages(*a, 3, 0, a->pages());
  write_pages(*b, 4, 0, b->pages() - 1);
  Segment* const both[] = {a.get(), b.get()};
  CHECK_FALSE(cache->commit_versions(both));
  cache->discard_version(*a);
  cache->discard_version(*b);
  CHECK(holds(*a, 1));
  CHECK(holds(*b, 2));
}

TEST_CASE_FIXTURE(VersionsFixture,
                  "no version is opened of what is pinned, newer in memory, shared, or not on disk") {
  make(256 * K, 256 * K);
  auto a = at_home(1);
  {
    const PagePin pin = cache->pin_page(*a, 2, Access::read);
    CHECK_FALSE(cache->open_version(*a, false));
    CHECK_FALSE(cache->open_version(*a, true));
  }
  REQUIRE(cache->open_version(*a, false));
  CHECK_FALSE(cache->open_version(*a, false));  // there is one
  cache->discard_version(*a);
  write(*a, 5);
  CHECK_FALSE(cache->open_version(*a, false));
  REQUIRE(cache->open_version(*a, /*write_first=*/true));
  cache->discard_version(*a);
  CHECK(holds(*a, 5));
  auto fresh = segment(100 * K);
  CHECK_FALSE(cache->open_version(*fresh, true));
  auto small = segment(100), other = segment(100);
  write(*small, 1);
  cache->evict(*small);
  CHECK_FALSE(cache->open_version(*small, true));
  auto host = segment(100 * K, Role::optimizer, Tier::host);
  write(*host, 1);
  CHECK_FALSE(cache->open_version(*host, true));
}

TEST_CASE_FIXTURE(VersionsFixture, "what fails while a version is written harms nothing of what was") {
  for (const Direction fails : {Direction::read, Direction::write}) {
    for (int ends = 0; ends < 12; ++ends) {
      make(112 * K, 0, 4 * kBlockBytes, /*failing=*/true);
      auto a = at_home(1);
      REQUIRE(cache->open_version(*a, false));
      int left = ends;
      io->set_outcome(
          [&](const Transfer& t) { return t.direction == fails && left-- <= 0 ? -static_cast<long>(EIO) : 1L; });
      try {
        write_pages(*a, 2, 0, a->pages());
        cache->write_behind(*a);
      } catch (const DiskError&) {
      }
      io->wait_all();
      io->set_outcome([](const Transfer&) { return 1L; });
      cache->discard_version(*a);
      CHECK(holds(*a, 1));
      try {
        cache->wait();  // tells of a write that failed
      } catch (const DiskError&) {
      }
      cache->evict(*a);
      CHECK(holds(*a, 1));
      a.reset();
    }
  }
}

TEST_CASE("space to spare is none that tensors left behind, and theirs when the disk is full") {
  const TemporaryDirectory directory;
  const auto swap_file = SwapFile::make({directory.path()}, {1});
  SwapFile& file = *swap_file;
  constexpr std::size_t kBytes = kMiB;
  std::vector<Extent> tensors;
  tensors.push_back(file.allocate(kBytes));
  const std::size_t size = file.size();
  while (file.used() < size) tensors.push_back(file.allocate(kBytes));
  tensors.resize(tensors.size() / 2);
  {
    const Extent spare = file.try_allocate_spare(kBytes);
    REQUIRE(spare);
    CHECK(file.size() > size);  // half of the file was free
  }
  const std::size_t grown = file.size();
  for (int i = 0; i < 3; ++i) CHECK(file.try_allocate_spare(kBytes));
  CHECK(file.size() == grown);
  // Free space serves tensors before the file grows again.
  while (file.used() < grown) tensors.push_back(file.allocate(kBytes));
  CHECK(file.size() == grown);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit full{grown, before.rlim_max};
  std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &full);
  CHECK_FALSE(file.try_allocate_spare(kBytes));
  tensors.pop_back();
  CHECK_FALSE(file.try_allocate_spare(kBytes));
  CHECK(file.allocate(kBytes));
  setrlimit(RLIMIT_FSIZE, &before);
}

TEST_CASE_FIXTURE(VersionsFixture, "a segment may die while its version is open and written") {
  make(256 * K, 0, 4 * kBlockBytes, /*failing=*/true);
  auto a = at_home(1);
  REQUIRE(cache->open_version(*a, false));
  write_pages(*a, 2, 0, a->pages());
  io->stall(true);
  cache->write_behind(*a);
  a.reset();
  io->stall(false);
  io->wait_all();
  CHECK(cache->usage(Pool::device).now == 0);
  auto b = at_home(3);
  CHECK(holds(*b, 3));
}

TEST_CASE_FIXTURE(VersionsFixture,
                  "a version that is opened while another thread waits for memory is not seen by that thread") {
  make(256 * K, 0, 4 * kBlockBytes, /*failing=*/true);
  auto a = at_home(1), large = at_home(2);
  const PinRequest both[] = {{large.get(), Access::read}, {a.get(), Access::read}};
  auto rest = segment(140 * K);
  write(*rest, 3);
  const PinRequest held{rest.get(), Access::read};
  cache->pin({&held, 1});
  std::atomic<bool> refused{false}, was_as_before{false};
  std::thread reader([&] {
    try {
      cache->pin(both);  // waits for `rest`
      bool same = true;
      for (std::size_t i = 0; i < a->bytes(); ++i) same = same && a->data[i] == pattern(1, i);
      was_as_before = same;
      cache->unpin(both);
    } catch (const VersionOpen&) {
      refused = true;
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  REQUIRE(cache->open_version(*a, false));
  write_pages(*a, 4, 0, 2);
  cache->unpin({&held, 1});
  reader.join();
  CHECK((refused || was_as_before));
  cache->discard_version(*a);
  CHECK(holds(*a, 1));
}
