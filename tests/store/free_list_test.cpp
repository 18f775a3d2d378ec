#include "zeropage/io/free_list.h"

#include <doctest/doctest.h>

#include <map>
#include <random>

using namespace zeropage;

TEST_CASE("the smallest hole that fits is taken, and neighbours merge") {
  FreeList list;
  list.release(0, 100);
  list.release(200, 50);
  CHECK(list.take(40) == 200);
  CHECK(list.take(100) == 0);
  CHECK_FALSE(list.take(20));
  list.release(0, 100);
  list.release(100, 100);
  list.release(200, 40);
  CHECK(list.ranges() == 1);
  CHECK(list.take(250) == 0);
}

TEST_CASE("ranges taken from the top are above ranges taken from the bottom") {
  FreeList list;
  list.release(0, 1000);
  CHECK(list.take(100, FreeList::Side::top) == 900);
  CHECK(list.take(100) == 0);
  CHECK(list.take(100, FreeList::Side::top) == 800);
}

TEST_CASE("after any sequence of allocations and frees nothing overlaps, and all of it merges back") {
  FreeList list;
  list.release(0, 1 << 20);
  std::map<std::size_t, std::size_t> alive;
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    if (alive.size() > 64 || (!alive.empty() && random() % 2)) {
      auto victim = std::next(alive.begin(), random() % alive.size());
      list.release(victim->first, victim->second);
      alive.erase(victim);
    } else if (auto at =
                   list.take(1 + random() % 20000, random() % 4 ? FreeList::Side::bottom : FreeList::Side::top)) {
      const auto bytes = [&] {  // only the caller of take() knows the size; read it back from what is free
        std::size_t used = 0;
        for (auto& [_, size] : alive) used += size;
        return (1 << 20) - list.free_bytes() - used;
      }();
      const auto next = alive.lower_bound(*at);
      CHECK((next == alive.end() || *at + bytes <= next->first));
      if (next != alive.begin()) CHECK(std::prev(next)->first + std::prev(next)->second <= *at);
      alive.emplace(*at, bytes);
    }
  }
  for (auto& [offset, bytes] : alive) list.release(offset, bytes);
  CHECK(list.ranges() == 1);
  CHECK(list.free_bytes() == 1 << 20);
}
