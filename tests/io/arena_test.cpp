#include "zeropage/io/arena.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "forked_child.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

using namespace zeropage;

TEST_CASE("blocks are aligned for O_DIRECT, disjoint and inside the arena") {
  Arena arena(8 * kMiB);
  auto a = arena.try_allocate(100), b = arena.try_allocate(3 * kMiB);
  REQUIRE((a && b));
  for (const Block* block : {&*a, &*b}) {
    CHECK(reinterpret_cast<std::size_t>(block->data()) % kBlockBytes == 0);
    CHECK(block->data() >= arena.base());
    CHECK(block->data() + block->bytes() <= arena.base() + arena.capacity());
    std::memset(block->data(), 7, block->bytes());
  }
  CHECK(a->bytes() == kBlockBytes);
  CHECK((a->data() + a->bytes() <= b->data() || b->data() + b->bytes() <= a->data()));
}

TEST_CASE("what dies makes room for what is created") {
  Arena arena(4 * kMiB);
  auto all = arena.try_allocate(4 * kMiB);
  REQUIRE(all);
  CHECK_FALSE(arena.try_allocate(kBlockBytes));
  all.reset();
  CHECK(arena.try_allocate(4 * kMiB));
}

TEST_CASE("a kernel may read a few bytes beyond any block") {
  const auto sum_beyond = [](const Block& block) {
    int sum = 0;
    for (std::size_t i = 0; i < 64; ++i) sum += std::to_integer<int>(block.data()[block.bytes() + i]);
    return sum;
  };
  Arena joins(8 * kMiB), registered(8 * kMiB, [](std::span<std::byte>) {});
  for (Arena* arena : {&joins, &registered}) {
    const auto all = arena->try_allocate(8 * kMiB);
    REQUIRE(all);
    CHECK(sum_beyond(*all) == 0);
  }
  std::vector<Block> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(*joins.try_allocate(kMiB));
  for (int i = 0; i < 8; i += 2) blocks[i] = Block();
  const auto joined = joins.try_allocate(4 * kMiB);
  REQUIRE(joined);
  CHECK(sum_beyond(*joined) == 0);
  for (int i = 1; i < 8; i += 2) (void)sum_beyond(blocks[i]);  // what was behind them has moved
}

TEST_CASE("each slab is announced once, before it is used") {
  std::size_t announced = 0;
  Arena arena(3 * Arena::kSlabBytes, [&](std::span<std::byte> slab) { announced += slab.size(); });
  CHECK(announced == 0);
  auto a = arena.try_allocate(kMiB);
  CHECK(announced == Arena::kSlabBytes);
  auto b = arena.try_allocate(Arena::kSlabBytes);
  CHECK(announced == 2 * Arena::kSlabBytes);
}

TEST_CASE("holes of all sizes join, and no block moves") {
  Arena arena(64 * kMiB);
  CHECK(arena.joins_holes());
  std::vector<Block> blocks;
  std::mt19937 random(1);
  std::size_t used = 0;
  // Blocks of 4 KiB to 6 MiB until nothing fits, then every second one dies.
  while (true) {
    auto block = arena.try_allocate(kBlockBytes * (1 + random() % 1536));
    if (!block) break;
    std::memset(block->data(), static_cast<int>(blocks.size()), block->bytes());
    used += block->bytes();
    blocks.push_back(std::move(*block));
  }
  std::vector<std::byte*> places;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i % 2) used -= blocks[i].bytes(), blocks[i] = {};
    places.push_back(blocks[i].data());
  }
  auto rest = arena.try_allocate(arena.capacity() - used);
  REQUIRE(rest);
  std::memset(rest->data(), 0xEE, rest->bytes());
  CHECK_FALSE(arena.try_allocate(kBlockBytes));
  for (std::size_t i = 0; i < blocks.size(); i += 2) {
    CHECK(blocks[i].data() == places[i]);
    const auto value = static_cast<std::byte>(i);
    CHECK(
        std::all_of(blocks[i].data(), blocks[i].data() + blocks[i].bytes(), [&](std::byte b) { return b == value; }));
  }
}

TEST_CASE("an arena that joins holes for ever keeps its memory and finds addresses") {
  Arena arena(16 * kMiB);
  std::mt19937 random(2);
  std::vector<Block> blocks;
  std::size_t used = 0, refused = 0;
  for (int i = 0; i < 4000; ++i) {
    const std::size_t bytes = kBlockBytes * (1 + random() % 1024);
    while (used + bytes > arena.capacity()) {
      const std::size_t victim = random() % blocks.size();
      used -= blocks[victim].bytes();
      std::swap(blocks[victim], blocks.back());
      blocks.pop_back();
    }
    auto block = arena.try_allocate(bytes);
    if (!block) {
      ++refused;
      continue;
    }
    std::memset(block->data(), i, 64);
    used += block->bytes();
    blocks.push_back(std::move(*block));
  }
  CHECK(refused == 0);
}

TEST_CASE("holes join after any number of cuts") {
  Arena arena(64 * kMiB);
  std::mt19937 random(3);
  std::vector<Block> blocks;
  std::size_t used = 0;
  for (int round = 0; round < 10; ++round) {
    while (auto block = arena.try_allocate(kBlockBytes * (1 + random() % 2))) {
      used += block->bytes();
      std::memset(block->data(), static_cast<int>(used / kBlockBytes), 8);
      blocks.push_back(std::move(*block));
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (std::size_t i = blocks.size() / 2; i < blocks.size(); ++i) used -= blocks[i].bytes();
    blocks.resize(blocks.size() / 2);
    CHECK(arena.try_allocate((arena.capacity() - used) / 2));
    auto all = arena.try_allocate(arena.capacity() - used);
    REQUIRE(all);
    std::memset(all->data(), 0xEE, all->bytes());
  }
}

namespace {

/// Mappings of memory in the range that begin or end there within a huge page.
std::size_t mappings_that_cut(const std::byte* at, std::size_t bytes) {
  std::ifstream maps("/proc/self/maps");
  const auto begin = reinterpret_cast<std::size_t>(at), end = begin + bytes;
  std::size_t cuts = 0, mappings = 0;
  for (std::string line; std::getline(maps, line);) {
    std::size_t from = 0, to = 0;
    char may_read = '-';
    if (std::sscanf(line.c_str(), "%zx-%zx %c", &from, &to, &may_read) != 3 || to <= begin || from >= end) continue;
    ++mappings;
    const bool begins_within = from > begin && from % kHugePageBytes != 0;
    const bool ends_within = to < end && to % kHugePageBytes != 0;
    if (may_read == 'r') cuts += begins_within || ends_within;
  }
  CHECK(mappings > 0);
  return cuts;
}

std::size_t mappings_that_cut(const Arena& arena) { return mappings_that_cut(arena.base(), 16 * arena.capacity()); }

}  // namespace

TEST_CASE("huge pages stay whole while blocks of all sizes come and go") {
  Arena arena(128 * kMiB);
  std::mt19937 random(4);
  std::vector<Block> blocks;
  std::size_t used = 0, refused = 0, made = 0;
  const auto mark_of = [](const Block& block) { return static_cast<int>(block.bytes() / kBlockBytes % 251 + 1); };
  std::size_t wrong = 0;
  const auto kill_one = [&] {
    const std::size_t victim = random() % blocks.size();
    const auto mark = static_cast<std::byte>(mark_of(blocks[victim]));
    const std::byte *const begin = blocks[victim].data(), *const end = begin + blocks[victim].bytes();
    wrong += std::any_of(begin, end, [&](std::byte b) { return b != mark; });
    used -= blocks[victim].bytes();
    std::swap(blocks[victim], blocks.back());
    blocks.pop_back();
  };
  for (int i = 0; i < 4000; ++i) {
    const std::size_t most = i % 3 ? 2 * kMiB : 12 * kMiB;
    const std::size_t bytes = kBlockBytes * (1 + random() % (most / kBlockBytes));
    while (used + bytes > arena.capacity()) kill_one();
    auto block = arena.try_allocate(bytes, FreeList::Side::bottom, /*must=*/false);
    for (; !block && !blocks.empty(); block = arena.try_allocate(bytes, FreeList::Side::bottom, false)) {
      ++refused;
      kill_one();
    }
    REQUIRE(block);
    ++made;
    std::memset(block->data(), mark_of(*block), block->bytes());
    used += block->bytes();
    blocks.push_back(std::move(*block));
  }
  CHECK(refused < made);
  CHECK(mappings_that_cut(arena) == 0);
  CHECK(wrong == 0);
  // A block that must be made cuts them. Units of 8 KiB leave some memory unused.
  auto rest = arena.try_allocate(arena.capacity() - used - blocks.size() * 16 * kKiB);
  REQUIRE(rest);
  std::memset(rest->data(), 1, rest->bytes());
  CHECK(mappings_that_cut(arena) > 0);
  // Cut pages become whole again, and no block that lives changes.
  rest.reset();
  for (std::size_t i = blocks.size() / 2; i > 0; --i) kill_one();
  std::vector<Block> more;
  while (auto block = arena.try_allocate(4 * kMiB, FreeList::Side::bottom, false)) {
    std::memset(block->data(), 1, block->bytes());
    more.push_back(std::move(*block));
  }
  CHECK(!more.empty());
  while (!blocks.empty()) kill_one();
  CHECK(wrong == 0);
  more.clear();
  while (auto block = arena.try_allocate(4 * kMiB, FreeList::Side::bottom, false))
    blocks.push_back(std::move(*block));
  CHECK(blocks.size() >= arena.capacity() / (4 * kMiB) - 2);  // some pieces are far from each other
  for (const Block& block : blocks) {
    CHECK(reinterpret_cast<std::size_t>(block.data()) % kHugePageBytes == 0);
    CHECK(mappings_that_cut(block.data(), block.bytes()) == 0);
  }
}

TEST_CASE("an arena's memory is in no core dump, nor what takes the place of its holes") {
  Arena arena(4 * kMiB);
  std::vector<Block> blocks;
  while (auto block = arena.try_allocate(kBlockBytes)) blocks.push_back(std::move(*block));
  for (std::size_t i = 0; i < blocks.size(); i += 2) blocks[i] = {};
  auto joined = arena.try_allocate(2 * kMiB);
  REQUIRE(joined);
  for (const std::byte* at : {blocks[1].data(), joined->data()}) {
    std::ifstream maps("/proc/self/smaps");
    bool is_within = false;
    for (std::string line; std::getline(maps, line);) {
      std::size_t begin = 0, end = 0;
      if (std::sscanf(line.c_str(), "%zx-%zx ", &begin, &end) == 2) {
        is_within = begin <= reinterpret_cast<std::size_t>(at) && reinterpret_cast<std::size_t>(at) < end;
      } else if (is_within && line.starts_with("VmFlags:")) {
        CHECK((line + " ").find(" dd ") != std::string::npos);
      }
    }
  }
}

TEST_CASE("an arena that dies in a forked child leaves what the child has mapped in its place") {
  auto arena = std::make_unique<Arena>(64 * kMiB);
  auto block = arena->try_allocate(kMiB);
  const int result = in_forked_child([&] {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    void* const own = ::mmap(arena->base(), kHugePageBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (own != arena->base()) return 1;
    std::memset(own, 7, kHugePageBytes);
    if (!throws<AccessError>([&] { (void)arena->try_allocate(kMiB); })) return 2;
    block.reset();
    arena.reset();
    return static_cast<const char*>(own)[kHugePageBytes - 1] == 7 ? 0 : 3;
  });
  CHECK(result == 0);
  std::memset(block->data(), 1, block->bytes());
}

TEST_CASE("memory that is registered is not mapped anew") {
  Arena arena(8 * kMiB, [](std::span<std::byte>) {});
  CHECK_FALSE(arena.joins_holes());
  auto a = arena.try_allocate(3 * kMiB), b = arena.try_allocate(2 * kMiB), c = arena.try_allocate(3 * kMiB);
  REQUIRE((a && b && c));
  a.reset(), c.reset();
  CHECK_FALSE(arena.try_allocate(6 * kMiB));
}

TEST_CASE("a large arena, whose units are many blocks and do not divide it, joins what its units allow") {
  Arena arena(37 * 1024 * kMiB + 6 * kMiB);  // untouched except for a few bytes
  std::vector<Block> blocks;
  for (std::size_t used = 0; used + 37 * kMiB <= arena.capacity(); used += 37 * kMiB) {
    blocks.push_back(std::move(*arena.try_allocate(37 * kMiB)));
    *blocks.back().data() = static_cast<std::byte>(blocks.size());
  }
  for (std::size_t i = 0; i < blocks.size(); i += 2) blocks[i] = {};
  for (int round = 0; round < 3; ++round) {
    auto joined = arena.try_allocate(1024 * kMiB);
    REQUIRE(joined);
    joined->data()[0] = joined->data()[joined->bytes() - 1] = std::byte{1};
  }
  for (std::size_t i = 1; i < blocks.size(); i += 2) CHECK(*blocks[i].data() == static_cast<std::byte>(i + 1));
}
