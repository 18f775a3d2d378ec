#include <doctest/doctest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>
#include <thread>

#include "pager/cache_fixture.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

namespace {

struct SnapshotsFixture : CacheFixture {
  bool any_in_frame(const FrozenSegment& frozen) {
    for (std::size_t i = 0; i < frozen.pages(); ++i) {
      if (frozen.place(i) == Frozen::Place::frame) return true;
    }
    return false;
  }
  /// Page by page.
  void write_pages(TestSegment& s, unsigned seed, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      PagePin pin = cache->pin_page(s, i, Access::overwrite);
      pin.wait();
      for (std::size_t k = 0; k < s.bytes_of(i); ++k) pin.data()[k] = pattern(seed, i * s.page_bytes() + k);
    }
  }
};

}  // namespace

TEST_CASE_FIXTURE(SnapshotsFixture, "what was frozen at home stays what it was, however it is written afterwards") {
  make(256 * K, 256 * K);
  for (int way = 0; way < 5; ++way) {
    CAPTURE(way);
    auto a = segment(100 * K);
    write(*a, 1);
    cache->evict(*a);
    const FrozenSegment frozen = cache->freeze(*a);
    CHECK_FALSE(any_in_frame(frozen));
    if (way == 0) write(*a, 2);
    if (way == 1) write_pages(*a, 2, 0, a->pages());
    if (way == 2) cache->zero(*a), write(*a, 2);
    if (way == 3) write_pages(*a, 2, 0, 3), cache->evict(*a), write_pages(*a, 2, 3, 7);
    if (way == 4) {
      REQUIRE(cache->open_version(*a, /*write_first=*/false));
      write_pages(*a, 2, 0, a->pages());
      Segment* const segments[] = {a.get()};
      REQUIRE(cache->commit_versions(segments));
    }
    cache->evict(*a);
    CHECK(holds(*a, 2));
    CHECK(save(frozen, 1));
    write(*a, 3);
    cache->evict(*a);
    CHECK(save(frozen, 1));  // again
    CHECK(holds(*a, 3));
  }
}

TEST_CASE_FIXTURE(SnapshotsFixture, "a version that is dropped is nothing to what was frozen") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  write(*a, 1);
  cache->evict(*a);
  REQUIRE(cache->open_version(*a, /*write_first=*/false));
  CHECK_THROWS_AS((void)cache->freeze(*a), VersionOpen);
  cache->discard_version(*a);
  const FrozenSegment frozen = cache->freeze(*a);
  REQUIRE(cache->open_version(*a, /*write_first=*/false));
  write_pages(*a, 2, 0, 4);
  cache->evict(*a);
  cache->discard_version(*a);
  CHECK(save(frozen, 1));
  CHECK(holds(*a, 1));
}

TEST_CASE_FIXTURE(SnapshotsFixture, "pages that were never written are zeros") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  const FrozenSegment frozen = cache->freeze(*a);
  write(*a, 1);
  cache->evict(*a);
  for (std::size_t i = 0; i < frozen.pages(); ++i) CHECK(frozen.place(i) == Frozen::Place::nowhere);
  CHECK(holds(*a, 1));
}

TEST_CASE_FIXTURE(SnapshotsFixture, "what is newer in memory goes home, or is copied, before it is written") {
  make(256 * K, 256 * K);
  for (const Tier tier : {Tier::disk, Tier::host}) {
    for (const bool whole : {false, true}) {
      auto a = segment(100 * K, Role::parameter, tier);
      write(*a, 1);
      FrozenSegment frozen = cache->freeze(*a);
      std::thread training([&] { whole ? write(*a, 2) : write_pages(*a, 2, 0, a->pages()); });
      if (tier == Tier::host) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it waits
      CHECK(save(frozen, 1));
      training.join();
      CHECK(holds(*a, 2));
      frozen = {};
      write(*a, 3);
      CHECK(holds(*a, 3));
    }
  }
}

TEST_CASE_FIXTURE(SnapshotsFixture, "who holds a tensor for writing may go on, and what is written is kept") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  write(*a, 1);
  const PinRequest request{a.get(), Access::write};
  cache->pin({&request, 1});
  const FrozenSegment frozen = cache->freeze(*a);
  bool asked = false;
  SUBCASE("when it has been saved") {
    asked = true;
    cache->write_again(*a);
    for (std::size_t i = 0; i < a->bytes(); ++i) a->data[i] = pattern(2, i);
  }
  SUBCASE("without asking, where what is saved may be either") {
    write_pages(*a, 2, 0, 1);
    for (std::size_t i = 0; i < a->bytes(); ++i) a->data[i] = pattern(2, i);
  }
  cache->unpin({&request, 1});
  cache->evict(*a);
  CHECK(holds(*a, 2));
  CHECK((!asked || save(frozen, 1)));
}

TEST_CASE_FIXTURE(SnapshotsFixture, "an overwrite that has not ended is not part of what is frozen, and may fail") {
  make(160 * K, 96 * K);
  auto tensor = segment(48 * K);
  write(*tensor, 1);
  for (unsigned round = 0; round < 4; ++round) {
    const bool fails = round % 2 == 0;
    cache->evict(*tensor);
    FrozenSegment frozen;
    const PinRequest request{tensor.get(), Access::overwrite};
    if (round < 2) {
      cache->pin({&request, 1});
      for (std::size_t i = 0; i < tensor->bytes(); ++i) tensor->data[i] = pattern(round + 2, i);
      frozen = cache->freeze(*tensor);
      cache->unpin({&request, 1}, {}, this_thread_number(), fails);
    } else {
      try {
        for (std::size_t page = 0; page < tensor->pages(); ++page) {
          PagePin pin = cache->pin_page(*tensor, page, Access::overwrite);
          pin.wait();
          for (std::size_t i = 0; i < 16 * K; ++i) pin.data()[i] = pattern(round + 2, page * 16 * K + i);
          if (page == 0) frozen = cache->freeze(*tensor);
          if (fails) throw std::runtime_error("of an operator");
        }
      } catch (const std::runtime_error&) {
      }
    }
    const unsigned before = round < 2 ? 1 : 3;
    REQUIRE(frozen.place(0) == Frozen::Place::home);
    CHECK(save(frozen, before));
    CHECK(holds(*tensor, fails ? before : round + 2));
    frozen = {};
  }
  write(*tensor, 9);
  CHECK(holds(*tensor, 9));
}

TEST_CASE_FIXTURE(SnapshotsFixture, "a checkpoint copies a page in memory while operators wait for memory") {
  make(160 * K, 96 * K);
  auto tensor = segment(48 * K), large = segment(100 * K), larger = segment(150 * K);
  write(*tensor, 1);
  const PinRequest used{tensor.get(), Access::read};
  cache->pin({&used, 1});
  FrozenSegment frozen = cache->freeze(*tensor);  // which does not write home what is in use
  const PinRequest held{large.get(), Access::read}, wanted{larger.get(), Access::read};
  cache->pin({&held, 1});
  cache->unpin({&used, 1});
  std::thread waiting([&] {
    cache->pin({&wanted, 1});
    cache->unpin({&wanted, 1});
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  bool pinned = false;
  std::thread([&] { pinned = static_cast<bool>(frozen.try_pin(0)); }).join();
  cache->unpin({&held, 1});
  waiting.join();
  CHECK(pinned);
  CHECK(save(frozen, 1));
}

TEST_CASE_FIXTURE(SnapshotsFixture, "a frame that is a home may be written when its content is given up") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K, Role::parameter, Tier::host);
  write(*a, 1);
  FrozenSegment frozen = cache->freeze(*a);
  CHECK_FALSE(cache->try_pin_page(*a, 0, Access::write));
  CHECK(cache->try_pin_page(*a, 0, Access::read));
  std::thread training([&] { write(*a, 2); });
  frozen = {};
  training.join();
  CHECK(holds(*a, 2));
}

TEST_CASE_FIXTURE(SnapshotsFixture, "its room on disk comes back, whether the checkpoint or training lets go first") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  write(*a, 1);
  cache->evict(*a);
  std::size_t size = 0;
  for (int i = 0; i < 20; ++i) {
    FrozenSegment frozen = cache->freeze(*a);
    write(*a, 2 + i);
    cache->evict(*a);
    if (i % 3 == 0) frozen = {};
    if (i % 3 == 1) write_pages(*a, 2 + i, 0, 3), cache->evict(*a);
    if (i == 2) size = cache->swap_bytes();
  }
  CHECK(cache->swap_bytes() == size);
  CHECK(holds(*a, 21));
}

namespace {

/// A disk whose swap file is full and cannot grow.
struct FullDiskFixture : SnapshotsFixture {
  rlimit limit{};
  bool is_full = false;
  void (*before)(int) = nullptr;
  std::vector<std::unique_ptr<TestSegment>> rest;  // takes what is left of the swap file

  void fill() {
    REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    before = std::signal(SIGXFSZ, SIG_IGN);
    rlimit full = limit;
    full.rlim_cur = cache->swap_bytes();
    REQUIRE(setrlimit(RLIMIT_FSIZE, &full) == 0);
    is_full = true;
    CHECK_THROWS_AS(
        [&] {
          while (true) rest.push_back(segment(40 * K));
        }(),
        DiskError);
  }
  ~FullDiskFixture() {
    if (is_full) setrlimit(RLIMIT_FSIZE, &limit), std::signal(SIGXFSZ, before);
  }
  /// Runs `work` on a thread; whether it waits until the checkpoint is done.
  template <class Work>
  bool waits_for(FrozenSegment& frozen, unsigned seed, Work work) {
    std::atomic<bool> done = false;
    std::thread training([&] { work(), done = true; });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const bool waited = !done;
    CHECK(save(frozen, seed));
    frozen = {};
    training.join();
    return waited;
  }
};

}  // namespace

TEST_CASE_FIXTURE(FullDiskFixture, "where the disk has no room for both, writing waits for the checkpoint") {
  make(256 * K, 256 * K);
  auto a = segment(200 * K);
  write(*a, 1);
  cache->evict(*a);
  fill();
  FrozenSegment frozen = cache->freeze(*a);
  CHECK(waits_for(frozen, 1, [&] { write(*a, 2); }));
  cache->evict(*a);
  CHECK(holds(*a, 2));
}

TEST_CASE_FIXTURE(FullDiskFixture, "where a checkpoint has the room, a new tensor waits for it") {
  make(256 * K, 256 * K);
  auto a = segment(200 * K);
  write(*a, 1);
  cache->evict(*a);
  auto b = segment(200 * K);  // whose room training takes while the checkpoint has that of a
  fill();
  FrozenSegment frozen = cache->freeze(*a);
  b = nullptr;
  write(*a, 2);
  cache->evict(*a);
  std::unique_ptr<TestSegment> made;
  CHECK(waits_for(frozen, 1, [&] { made = segment(180 * K); }));
  write(*made, 3);
  CHECK(holds(*a, 2));
  CHECK(holds(*made, 3));
}

TEST_CASE_FIXTURE(SnapshotsFixture, "a write that fails raises an error, and leaves the snapshot as it was") {
  make(256 * K, 256 * K, 16 * K, /*failing=*/true);
  auto a = segment(100 * K);
  write(*a, 1);
  io->set_outcome([](const Transfer& t) { return t.direction == Direction::write ? -static_cast<long>(EIO) : 1L; });
  FrozenSegment frozen = cache->freeze(*a);
  CHECK_THROWS_AS(write(*a, 2), DiskError);
  CHECK_THROWS_AS(write_pages(*a, 2, 0, 1), DiskError);
  io->set_outcome([](const Transfer&) { return 1L; });
  CHECK(save(frozen, 1));
  CHECK(holds(*a, 1));
  write(*a, 2);
  CHECK(holds(*a, 2));
}

TEST_CASE_FIXTURE(SnapshotsFixture, "tensors that share a page are not frozen one by one") {
  make(256 * K, 256 * K, 256 * K);
  auto a = segment(1 * K);
  CHECK_FALSE(cache->can_freeze(*a));
  CHECK_THROWS_AS((void)cache->freeze(*a), AccessError);
}

TEST_CASE_FIXTURE(SnapshotsFixture, "a cache that is closed meanwhile takes all with it") {
  make(256 * K, 256 * K);
  auto a = segment(100 * K);
  write(*a, 1);
  const FrozenSegment frozen = cache->freeze(*a);
  cache->close();
  CHECK_THROWS_AS((void)frozen.read(0, buffer.get()), AccessError);
}

namespace {

struct SourcesFixture : SnapshotsFixture {
  std::string path = std::string(directory.path()) + "/source";

  void make_file(std::size_t bytes, unsigned seed, std::size_t offset) {
    std::ofstream file(path, std::ios::binary);
    for (std::size_t i = 0; i < offset; ++i) file.put('x');
    for (std::size_t i = 0; i < bytes; ++i) file.put(static_cast<char>(pattern(seed, i)));
  }
  std::unique_ptr<TestSegment> from_file(std::size_t bytes, std::size_t offset) {
    auto made = std::make_unique<TestSegment>();
    SegmentSpec spec{bytes, 0, Role::parameter, Tier::disk};
    spec.source = {std::make_shared<SourceFile>(path), offset};
    cache->bind(*made, spec);
    return made;
  }
};

}  // namespace

TEST_CASE_FIXTURE(SourcesFixture, "content in a file is read from there until it is written") {
  make(256 * K, 256 * K);
  for (const std::size_t offset : {std::size_t{0}, 4 * K, std::size_t{17}}) {
    make_file(100 * K, 1, offset);
    auto a = from_file(100 * K, offset);
    CHECK(holds(*a, 1));
    CHECK(cache->stats().source_bytes == 100 * K);
    const FrozenSegment frozen = cache->freeze(*a);
    write_pages(*a, 2, 0, 2);
    cache->evict(*a);
    CHECK(cache->stats().source_bytes == 68 * K);
    write_pages(*a, 2, 2, 7);
    cache->evict(*a);
    CHECK(cache->stats().source_bytes == 0);
    CHECK(holds(*a, 2));
    CHECK(save(frozen, 1));
  }
}

TEST_CASE_FIXTURE(SourcesFixture, "a file that was written meanwhile is never taken for what it was") {
  make(256 * K, 256 * K);
  make_file(100 * K, 1, 0);
  auto a = from_file(100 * K, 0);
  CHECK(holds(*a, 1));
  cache->evict(*a);
  make_file(100 * K, 2, 0);
  CHECK_THROWS_AS(holds(*a, 2), DiskError);
  write(*a, 3);  // all of it
  CHECK(holds(*a, 3));
}
