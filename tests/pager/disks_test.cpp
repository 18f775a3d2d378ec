// Several disks under one cache.
#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "pager/cache_fixture.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

using namespace zeropage;

namespace {

struct DisksFixture : CacheFixture {
  TemporaryDirectory second;
  std::vector<std::unique_ptr<TestSegment>> segments;

  void make_on_both(bool failing) {
    std::unique_ptr<Io> engine;
    if (failing) {
      auto made = std::make_unique<FailingIo>();
      io = made.get();
      engine = std::move(made);
    }
    // Other programs run while the cache measures the disks. 5 ms a transfer make both equally slow.
    if (io) {
      io->set_outcome([](const Transfer&) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return 1L;
      });
    }
    cache = FrameCache::make({.device_bytes = 4 * kMiB,
                              .host_bytes = 16 * kMiB,
                              .disk_path = directory.path() + ":" + second.path(),
                              .page_bytes = 4 * kMiB},
                             std::move(engine));
    if (io) io->set_outcome([](const Transfer&) { return 1L; });
    for (unsigned i = 0; i < 8; ++i) {
      segments.push_back(segment(3 * kMiB + 20 * kBlockBytes));
      write(*segments[i], i);
    }
    cache->wait();
  }
};

}  // namespace

TEST_CASE_FIXTURE(DisksFixture, "pages come back from several disks as they were") {
  make_on_both(false);
  for (auto& s : segments) cache->evict(*s);
  for (unsigned i = 0; i < segments.size(); ++i) CHECK(holds(*segments[i], i));
}

TEST_CASE_FIXTURE(DisksFixture, "a transfer with one failed piece has failed, and is whole when it is tried again") {
  make_on_both(true);
  for (auto& s : segments) cache->evict(*s);
  cache->wait();
  int failures = 0;
  for (int piece = 1; piece <= 4; ++piece) {
    CAPTURE(piece);
    std::atomic<int> read = 0;
    std::mutex mutex;
    std::map<const File*, int> files;
    io->set_outcome([&, piece](const Transfer& t) {
      std::lock_guard lock(mutex);
      ++files[t.file];
      return t.direction == Direction::read && ++read == piece ? -long{EIO} : 1L;
    });
    int errors = 0;
    for (int i = 0; i < 8; ++i) {
      bool same = false;
      try {
        same = holds(*segments[i], i);
      } catch (const DiskError&) {
        ++errors;
        same = holds(*segments[i], i);
      }
      CHECK(same);
      cache->evict(*segments[i]);
    }
    cache->wait();
    io->set_outcome([](const Transfer&) { return 1L; });
    CHECK(files.size() == 2);
    for (const auto& [_, count] : files) CHECK(count >= 8);  // each segment is on both
    failures += errors;
  }
  CHECK(failures >= 1);  // those of reads ahead start again
}

TEST_CASE_FIXTURE(DisksFixture, "a transfer that has failed in one piece is not over before the others are") {
  make_on_both(true);
  for (auto& s : segments) cache->evict(*s);
  cache->wait();
  std::atomic<bool> goes_on = false;
  std::atomic<const File*> failed = nullptr;
  std::atomic<bool> other_reads = false;  // a piece on the other disk
  io->set_outcome([&](const Transfer& t) {
    if (t.direction == Direction::write) return 1L;
    const File* none = nullptr;
    if (failed.compare_exchange_strong(none, t.file)) return -long{EIO};
    other_reads = other_reads || t.file != failed;
    while (!goes_on) std::this_thread::yield();
    return 1L;
  });
  std::atomic<bool> over = false;
  int errors = 0;
  std::thread reader([&] {
    try {
      holds(*segments[0], 0);
    } catch (const DiskError&) {
      ++errors;
    }
    over = true;
  });
  for (int i = 0; i < 2000 && !over && !other_reads; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(other_reads);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_FALSE(over);  // its memory is still being read into
  goes_on = true;
  reader.join();
  CHECK(errors == 1);
  CHECK(holds(*segments[0], 0));
}

TEST_CASE_FIXTURE(DisksFixture,
                  "a transfer whose later piece cannot be started has failed when the earlier ones have") {
  for (const bool earlier_end_first : {true, false}) {
    CAPTURE(earlier_end_first);
    segments.clear();
    make_on_both(true);
    for (auto& s : segments) cache->evict(*s);
    cache->wait();
    io->refuse_start(2, earlier_end_first);
    CHECK_THROWS_AS(holds(*segments[0], 0), DiskError);
    CHECK(holds(*segments[0], 0));
    cache->wait();
    cache.reset();
  }
}
