#include "zeropage/io/tensor_heap.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "forked_child.h"

using namespace zeropage;

namespace {

/// Seconds that pass only when a test says so.
struct HandClock {
  std::chrono::steady_clock::time_point now{};
  TensorHeap::Clock clock() {
    return [this] { return now; };
  }
  void pass(std::chrono::seconds time) { now += time; }
};

/// Bytes that the kernel holds in memory for [data, data + bytes), in pages of 4 KiB.
std::size_t in_memory(std::byte* data, std::size_t bytes) {
  std::vector<unsigned char> pages(bytes / kBlockBytes);
  REQUIRE(::mincore(data, bytes, pages.data()) == 0);
  std::size_t found = 0;
  for (const unsigned char page : pages) found += (page & 1) * kBlockBytes;
  return found;
}

std::byte* filled(TensorHeap& heap, std::size_t bytes, int value = 1) {
  std::byte* const data = heap.try_allocate(bytes);
  REQUIRE(data);
  std::memset(data, value, bytes);
  return data;
}

}  // namespace

TEST_CASE("blocks of a tensor heap are aligned, disjoint and keep their bytes") {
  TensorHeap heap(kGiB);
  std::mt19937 random(1);
  std::map<std::byte*, std::pair<std::size_t, unsigned char>> live;
  const auto check = [](std::byte* data, std::size_t bytes, unsigned char value) {
    CHECK(std::to_integer<unsigned char>(data[0]) == value);
    CHECK(std::to_integer<unsigned char>(data[bytes / 2]) == value);
    CHECK(std::to_integer<unsigned char>(data[bytes - 1]) == value);
  };
  std::size_t alive = 0;
  for (int i = 0; i < 2000; ++i) {
    if (alive > 64 * kMiB || (!live.empty() && random() % 2)) {
      auto at = std::next(live.begin(), random() % live.size());
      check(at->first, at->second.first, at->second.second);
      alive -= round_up(at->second.first, kBlockBytes);
      heap.release(at->first);
      live.erase(at);
    } else {
      const std::size_t bytes = TensorHeap::kLeast + random() % (4 * kMiB);
      const auto value = static_cast<unsigned char>(random());
      std::byte* const data = filled(heap, bytes, value);
      CHECK(reinterpret_cast<std::size_t>(data) % kBlockBytes == 0);
      CHECK(heap.owns(data));
      CHECK(heap.owns(data + bytes - 1));
      const auto [at, added] = live.emplace(data, std::pair{bytes, value});
      REQUIRE(added);
      if (at != live.begin()) CHECK(std::prev(at)->first + std::prev(at)->second.first <= data);
      if (std::next(at) != live.end()) CHECK(data + bytes <= std::next(at)->first);
      alive += round_up(bytes, kBlockBytes);
    }
    CHECK(heap.alive_bytes() == alive);
    CHECK(heap.resident_bytes() >= alive);
  }
  for (const auto& [data, what] : live) check(data, what.first, what.second);
}

TEST_CASE("memory that is used again stays, whatever the sizes") {
  TensorHeap heap(kGiB);
  std::byte* const first = filled(heap, 96 * kMiB);
  heap.release(first);
  const std::size_t resident = heap.resident_bytes();
  for (std::size_t size = 1; size <= 12; ++size) {
    std::vector<std::byte*> blocks;
    for (std::size_t total = 0; total + size <= 96; total += size) {
      blocks.push_back(heap.try_allocate(size * kMiB));
      REQUIRE(blocks.back());
      CHECK(in_memory(blocks.back(), size * kMiB) == size * kMiB);  // no page fault when it is touched
    }
    for (std::byte* const block : blocks) heap.release(block);
  }
  CHECK(heap.resident_bytes() == resident);
}

TEST_CASE("holes of all sizes are at most the slack beyond the most bytes alive") {
  TensorHeap heap(2 * kGiB);
  std::vector<std::byte*> stay;  // between the blocks, so that holes cannot merge; each on a huge page of its own
  for (std::size_t size = 2; size <= 16; ++size) {
    std::vector<std::byte*> blocks;
    for (std::size_t total = 0; total < 64; total += size) {
      blocks.push_back(filled(heap, size * kMiB));
      stay.push_back(filled(heap, kHugePageBytes));
    }
    // Holes of an odd number of MiB share huge pages with their neighbours.
    CHECK(heap.resident_bytes() <= heap.alive_bytes() + stay.size() * kHugePageBytes + TensorHeap::kSlack);
    std::size_t really = 0;
    for (std::byte* const block : blocks) really += in_memory(block, round_down(size * kMiB, kBlockBytes));
    CHECK(really >= 64 * kMiB);
    for (std::byte* const block : blocks) heap.release(block);
  }
}

TEST_CASE("memory of a peak that is long past goes back to the system") {
  HandClock hand;
  TensorHeap heap(kGiB, hand.clock());
  std::byte* const peak = filled(heap, 512 * kMiB);
  heap.release(peak);
  CHECK(heap.resident_bytes() == 512 * kMiB);
  for (int i = 0; i < 4; ++i) {
    hand.pass(TensorHeap::kLately);
    heap.release(filled(heap, 8 * kMiB));
  }
  CHECK(heap.resident_bytes() <= 8 * kMiB + TensorHeap::kSlack);
  CHECK(in_memory(peak, 512 * kMiB) <= 8 * kMiB + TensorHeap::kSlack);
}

TEST_CASE("trim returns all that is free, and a block that is freed after a pause what an earlier peak left") {
  HandClock hand;
  TensorHeap heap(kGiB, hand.clock());
  std::byte* const stays = filled(heap, 4 * kMiB);
  heap.release(filled(heap, 256 * kMiB));
  std::byte* const last = filled(heap, 4 * kMiB);
  hand.pass(TensorHeap::kLately);
  heap.release(filled(heap, 4 * kMiB));
  hand.pass(TensorHeap::kLately);
  heap.release(last);  // makes no block
  CHECK(heap.resident_bytes() <= 12 * kMiB + TensorHeap::kSlack);
  CHECK(heap.resident_bytes() > 4 * kMiB);
  heap.trim();
  CHECK(heap.resident_bytes() == 4 * kMiB);
  CHECK(std::to_integer<int>(stays[4 * kMiB - 1]) == 1);
}

TEST_CASE("a heap that keeps nothing returns each block, and keeps what is alive") {
  TensorHeap heap(kGiB);
  std::byte* const one = filled(heap, 32 * kMiB, 7);
  std::byte* const other = filled(heap, 32 * kMiB, 8);
  heap.release(other);
  heap.set_keeps(false);
  CHECK(heap.resident_bytes() == 32 * kMiB);
  CHECK(in_memory(other, 32 * kMiB) == 0);
  CHECK(std::to_integer<int>(one[32 * kMiB - 1]) == 7);
  heap.release(one);
  CHECK(heap.resident_bytes() == 0);
  CHECK(in_memory(one, 32 * kMiB) == 0);
  heap.set_keeps(true);
  heap.release(filled(heap, 32 * kMiB));
  CHECK(heap.resident_bytes() == 32 * kMiB);
}

TEST_CASE("a tensor heap declines small blocks and those that do not fit") {
  TensorHeap heap(64 * kMiB);
  CHECK_FALSE(heap.try_allocate(TensorHeap::kLeast - 1));
  CHECK_FALSE(heap.try_allocate(65 * kMiB));
  std::byte* const all = heap.try_allocate(64 * kMiB);
  REQUIRE(all);
  CHECK_FALSE(heap.try_allocate(TensorHeap::kLeast));
  CHECK(std::to_integer<int>(all[64 * kMiB]) == 0);  // kernels may read a few bytes beyond
  heap.release(all);
  CHECK(heap.try_allocate(TensorHeap::kLeast));
}

TEST_CASE("a forked child reads the heap's blocks and makes none") {
  TensorHeap heap(64 * kMiB);
  std::byte* const block = filled(heap, kMiB, 5);
  CHECK(in_forked_child([&] {
          if (heap.try_allocate(kMiB)) return 1;
          if (std::to_integer<int>(block[kMiB - 1]) != 5) return 2;
          heap.release(block);
          heap.trim();
          heap.set_keeps(false);
          return 0;
        }) == 0);
  CHECK(std::to_integer<int>(block[kMiB - 1]) == 5);
  heap.release(block);
}

TEST_CASE("threads share a tensor heap") {
  TensorHeap heap(kGiB);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&heap, &wrong, t] {
      std::vector<std::byte*> blocks;
      for (int i = 0; i < 200; ++i) {
        std::byte* const data = heap.try_allocate(TensorHeap::kLeast * (1 + i % 5));
        std::memset(data, t, TensorHeap::kLeast);
        blocks.push_back(data);
        if (i % 3 == 0) continue;
        wrong[t] += std::to_integer<int>(blocks.front()[TensorHeap::kLeast - 1]) != t;
        heap.release(blocks.front());
        blocks.erase(blocks.begin());
      }
      for (std::byte* const block : blocks) heap.release(block);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) CHECK(count == 0);
  CHECK(heap.alive_bytes() == 0);
}
