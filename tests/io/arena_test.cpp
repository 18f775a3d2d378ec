#include "zeropage/io/arena.h"

#include <doctest/doctest.h>

#include <cstring>

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

TEST_CASE("what dies makes room for what is born") {
  Arena arena(4 * kMiB);
  auto all = arena.try_allocate(4 * kMiB);
  REQUIRE(all);
  CHECK_FALSE(arena.try_allocate(kBlockBytes));
  all.reset();
  CHECK(arena.try_allocate(4 * kMiB));
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
