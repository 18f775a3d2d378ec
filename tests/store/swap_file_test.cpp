#include "zeropage/store/swap_file.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "failing_io.h"
#include "temporary_directory.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

using namespace zeropage;

namespace {

/// A quota in miniature: no file of this process may grow past it.
class LargestFile {
 public:
  explicit LargestFile(std::size_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit small = before_;
    small.rlim_cur = bytes;
    ::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~LargestFile() { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

/// The size of the files that hold the 64 MiB from `offset` on.
std::size_t bytes_of_files(const SwapFile& swap, std::uint64_t offset) {
  std::map<const File*, std::size_t> sizes;
  swap.for_each_piece(offset, 64 * kMiB, [&](const SwapFile::Piece& piece) {
    struct stat info {};
    ::fstat(piece.file->descriptor(), &info);
    sizes[piece.file] = info.st_size;
  });
  std::size_t sum = 0;
  for (const auto& [_, size] : sizes) sum += size;
  return sum;
}

}  // namespace

TEST_CASE("extents are blocks of the file, and the dead ones are used again") {
  TemporaryDirectory directory;
  const auto swap_file = SwapFile::make({directory.path()}, {1});
  SwapFile& swap = *swap_file;
  std::size_t size = 0;
  {
    Extent a = swap.allocate(5000), b = swap.allocate(10 * kMiB);
    CHECK(a.bytes() == 2 * kBlockBytes);
    CHECK(a.ranges()[0].offset % kBlockBytes == 0);
    CHECK((a.ranges()[0].offset + a.bytes() <= b.ranges()[0].offset ||
           b.ranges()[0].offset + b.bytes() <= a.ranges()[0].offset));
    CHECK(swap.used() == a.bytes() + b.bytes());
    size = swap.size();
  }
  CHECK(swap.used() == 0);
  for (int i = 0; i < 100; ++i) Extent again = swap.allocate(10 * kMiB);
  CHECK(swap.size() == size);
}

TEST_CASE("a disk that cannot grow the file is an error at creation, with sizes, and what was there stays") {
  TemporaryDirectory directory;
  const auto swap_file = SwapFile::make({directory.path()}, {1});
  SwapFile& swap = *swap_file;
  Extent first = swap.allocate(kMiB);
  {
    const LargestFile limit(100 * kMiB);
    CHECK_THROWS_WITH_AS(swap.allocate(200 * kMiB), doctest::Contains("cannot hold 209.7 MB more"), DiskError);
    CHECK(swap.allocate(kMiB));  // what fits still goes
  }
  CHECK(swap.allocate(200 * kMiB));
}

TEST_CASE("free space serves any extent, however it is scattered") {
  TemporaryDirectory directory;
  const auto swap_file = SwapFile::make({directory.path()}, {1});
  SwapFile& swap = *swap_file;
  std::vector<Extent> small, large;
  swap.grow(64 * kMiB);
  const std::size_t size = swap.size();
  while (swap.used() + 4 * kMiB <= size) {
    large.push_back(swap.allocate(3 * kMiB));
    small.push_back(swap.allocate(kMiB));
  }
  large.clear();
  const LargestFile limit(size);
  const Extent extent = swap.allocate(10 * kMiB);  // no hole has more than 3 MiB
  CHECK(extent.bytes() == 10 * kMiB);
  std::size_t covered = 0;
  swap.for_each_piece(extent, extent.bytes(), [&](const SwapFile::Piece& piece) {
    CHECK(piece.at == covered);
    covered += piece.bytes;
  });
  CHECK(covered == 10 * kMiB);
  CHECK(swap.used() == small.size() * kMiB + 10 * kMiB);
}

namespace {

struct TwoDisks {
  TemporaryDirectory a, b;
  const std::vector<std::string> paths{a.path(), b.path()};
};

}  // namespace

TEST_CASE_FIXTURE(TwoDisks, "several disks get stripes in proportion to speed, and each byte is in one place") {
  const auto swap_file = SwapFile::make(paths, {3.1, 1});
  SwapFile& swap = *swap_file;
  const Extent extent = swap.allocate(70 * kMiB + kBlockBytes);  // the files end within a period
  std::map<const File*, std::map<std::uint64_t, std::size_t>> places;
  std::size_t covered = 0;
  swap.for_each_piece(extent.ranges()[0].offset, extent.bytes(), [&](const SwapFile::Piece& piece) {
    CHECK(piece.at == covered);
    covered += piece.bytes;
    CHECK(places[piece.file].emplace(piece.offset, piece.bytes).second);
  });
  CHECK(covered == extent.bytes());
  REQUIRE(places.size() == 2);
  std::size_t sums[2] = {}, ends[2] = {}, i = 0, size = 0;
  for (const auto& [file, pieces] : places) {
    for (const auto& [offset, bytes] : pieces) {
      CHECK(offset >= ends[i]);  // none overlaps another
      ends[i] = offset + bytes, sums[i] += bytes;
    }
    struct stat info {};
    REQUIRE(::fstat(file->descriptor(), &info) == 0);
    CHECK(static_cast<std::size_t>(info.st_size) >= ends[i]);
    size += info.st_size;
    ++i;
  }
  CHECK(size == swap.size());
  const double more = std::max(sums[0], sums[1]), less = std::min(sums[0], sums[1]);
  CHECK(more / less == doctest::Approx(3.1).epsilon(0.05));
}

TEST_CASE_FIXTURE(TwoDisks, "a part of a range is where the whole range says") {
  const auto swap_file = SwapFile::make(paths, {3, 1});
  SwapFile& swap = *swap_file;
  const Extent extent = swap.allocate(8 * kMiB);
  const auto place_of = [&](std::uint64_t offset) {
    std::pair<const File*, std::uint64_t> place;
    swap.for_each_piece(offset, kBlockBytes, [&](const SwapFile::Piece& p) { place = {p.file, p.offset}; });
    return place;
  };
  swap.for_each_piece(extent.ranges()[0].offset + 3 * kBlockBytes, 5 * kMiB, [&](const SwapFile::Piece& piece) {
    const auto at = extent.ranges()[0].offset + 3 * kBlockBytes + piece.at;
    CHECK(place_of(at) == std::pair(piece.file, piece.offset));
    CHECK(place_of(at + piece.bytes - kBlockBytes) ==
          std::pair(piece.file, piece.offset + piece.bytes - kBlockBytes));
  });
}

TEST_CASE_FIXTURE(TwoDisks, "a disk that is too slow for a stripe is left out, and one named twice is an error") {
  const auto swap_file = SwapFile::make(paths, {1000, 1});
  SwapFile& swap = *swap_file;
  const Extent extent = swap.allocate(100 * kMiB);
  std::size_t pieces = 0;
  swap.for_each_piece(extent.ranges()[0].offset, extent.bytes(), [&](const SwapFile::Piece&) { ++pieces; });
  CHECK(pieces == 1);
  CHECK_THROWS_WITH_AS(SwapFile::make({a.path(), a.path() + "/."}, {1, 1}), doctest::Contains("twice"), DiskError);
  CHECK_THROWS_WITH_AS(SwapFile::make(std::vector<std::string>(), {}), doctest::Contains("names no directory"),
                       DiskError);
  const Extent spare = swap.try_allocate_spare(kMiB);
  CHECK(spare);
}

TEST_CASE_FIXTURE(TwoDisks, "disks that are named are measured") {
  const auto io = make_io();
  const auto swap_file = SwapFile::make(a.path() + ":" + b.path(), *io);
  SwapFile& swap = *swap_file;
  const Extent extent = swap.allocate(64 * kMiB);
  std::map<const File*, std::size_t> bytes;
  swap.for_each_piece(extent.ranges()[0].offset, extent.bytes(),
                      [&](const SwapFile::Piece& p) { bytes[p.file] += p.bytes; });
  REQUIRE(bytes.size() == 2);  // they are one disk
  for (const auto& [_, n] : bytes) CHECK(n > 16 * kMiB);
  CHECK_THROWS_WITH_AS(SwapFile::make(a.path() + ":/missing", *io), doctest::Contains("/missing"), DiskError);
}

TEST_CASE_FIXTURE(TwoDisks, "a moment's stall does not make a disk slow") {
  FailingIo io(4);
  // Every request takes as long as the next, except for the first ones of one disk.
  std::atomic<int> stalls = 32;
  io.set_outcome([&](const Transfer& transfer) {
    const bool stalled = transfer.file->name().find(b.path()) != std::string::npos && stalls-- > 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(stalled ? 50 : 3));
    return 1L;
  });
  const auto swap_file = SwapFile::make(a.path() + ":" + b.path(), io);
  CHECK(stalls <= 0);
  const Extent extent = swap_file->allocate(64 * kMiB);
  std::map<const File*, std::size_t> bytes;
  swap_file->for_each_piece(extent.ranges()[0].offset, extent.bytes(),
                            [&](const SwapFile::Piece& p) { bytes[p.file] += p.bytes; });
  REQUIRE(bytes.size() == 2);
  for (const auto& [_, n] : bytes) CHECK(n > 16 * kMiB);
}

TEST_CASE_FIXTURE(TwoDisks, "where one disk is full none grows, and what fits still goes") {
  const auto swap_file = SwapFile::make(paths, {1, 3});
  SwapFile& swap = *swap_file;
  const Extent first = swap.allocate(kMiB);
  const std::size_t before = swap.size();
  {
    const LargestFile limit(120 * kMiB);
    CHECK_THROWS_WITH_AS(swap.allocate(200 * kMiB), doctest::Contains("its share of 209.7 MB"), DiskError);
    CHECK(swap.size() == before);
    CHECK(bytes_of_files(swap, first.ranges()[0].offset) <= before);
    CHECK(swap.allocate(70 * kMiB));
    CHECK(swap.size() > before);
  }
  const Extent large = swap.allocate(200 * kMiB);
  std::size_t covered = 0;
  swap.for_each_piece(large.ranges()[0].offset, large.bytes(), [&](const SwapFile::Piece& piece) {
    struct stat info {};
    REQUIRE(::fstat(piece.file->descriptor(), &info) == 0);
    CHECK(piece.offset + piece.bytes <= static_cast<std::size_t>(info.st_size));
    covered += piece.bytes;
  });
  CHECK(covered == large.bytes());
}

TEST_CASE_FIXTURE(TwoDisks, "the faster disk gets more") {
  FailingIo io;
  std::atomic<const File*> first = nullptr;  // the one that is measured first
  io.set_outcome([&](const Transfer& t) {
    const File* none = nullptr;
    first.compare_exchange_strong(none, t.file);
    std::this_thread::sleep_for(std::chrono::milliseconds(t.file == first ? 0 : 20));
    return 1L;
  });
  const auto swap_file = SwapFile::make(a.path() + ":" + b.path(), io);
  SwapFile& swap = *swap_file;
  const Extent extent = swap.allocate(64 * kMiB);
  std::vector<std::pair<const File*, std::size_t>> bytes;
  swap.for_each_piece(extent.ranges()[0].offset, extent.bytes(), [&](const SwapFile::Piece& p) {
    const auto known = std::ranges::find(bytes, p.file, &std::pair<const File*, std::size_t>::first);
    known == bytes.end() ? void(bytes.emplace_back(p.file, p.bytes)) : void(known->second += p.bytes);
  });
  REQUIRE(!bytes.empty());
  CHECK(bytes[0].second > 36 * kMiB);  // the first stripe is of the faster one
}

TEST_CASE("a directory whose name has a colon is one") {
  TemporaryDirectory directory;
  const std::string name = directory.path() + "/a:b";
  std::filesystem::create_directory(name);
  CHECK(split_disk_path(name) == std::vector<std::string>{name});
  CHECK(split_disk_path("/x:/y").size() == 2);
}
