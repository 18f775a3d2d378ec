// Several disks under one cache.
#include <doctest/doctest.h>

#include <cerrno>

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
    cache = FrameCache::make({.device_bytes = 4 * kMiB,
                              .host_bytes = 16 * kMiB,
                              .disk_path = directory.path() + ":" + second.path(),
                              .page_bytes = 4 * kMiB},
                             std::move(engine));
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

TEST_CASE_FIXTURE(DisksFixture, "a transfer of which one piece fails has failed, and is whole when it is tried again") {
  make_on_both(true);
  for (auto& s : segments) cache->evict(*s);
  cache->wait();
  int failures = 0;
  for (int piece = 1; piece <= 4; ++piece) {
    CAPTURE(piece);
    int read = 0;  // set before any is under way
    io->set_outcome([&read, piece](const Transfer& t) {
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
    CHECK(read >= 8 * 4);
    io->set_outcome([](const Transfer&) { return 1L; });
    cache->wait();
    failures += errors;
  }
  CHECK(failures >= 1);  // those of reads ahead start again
}
