#include "zeropage/comm/neighbours.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "forked_child.h"

using namespace zeropage;
using namespace std::chrono_literals;
using Channel = Neighbours::Channel;
using Bytes = std::vector<std::byte>;

namespace {

/// Ranks of one process that have met.
std::vector<std::unique_ptr<Neighbours>> ranks_that_met(int count, std::chrono::milliseconds timeout = 10s) {
  std::vector<std::unique_ptr<Neighbours>> ranks;
  for (int rank = 0; rank < count; ++rank) ranks.push_back(std::make_unique<Neighbours>(rank, count, 1, timeout));
  for (int rank = 0; rank < count; ++rank) {
    for (int other = 0; other < count; ++other) {
      if (other == rank) continue;
      REQUIRE(ranks[rank]->meet(other, ranks[other]->introduction()) == Neighbours::Met::here);
    }
  }
  return ranks;
}

Bytes content(int from, int to, std::uint64_t tag, std::size_t bytes) {
  std::mt19937_64 random(tag * 100 + static_cast<std::uint64_t>(from * 10 + to));
  Bytes made(bytes);
  for (std::byte& byte : made) byte = static_cast<std::byte>(random());
  return made;
}

/// One rank's part of exchanges with all others: starts `ahead` of them before it waits for the first.
void exchange_all(Neighbours& mine, int rank, int ranks, Channel channel, int count, std::size_t ahead) {
  struct Open {
    std::vector<Bytes> in, out;
    std::shared_ptr<Neighbours::Exchange> exchange;
    std::uint64_t tag;
  };
  std::vector<Open> open;
  const auto finish = [&] {
    Open& oldest = open.front();
    oldest.exchange->wait(0ms);
    for (int other = 0, i = 0; other < ranks; ++other) {
      if (other == rank) continue;
      CHECK(oldest.in[i] == content(other, rank, oldest.tag, oldest.in[i].size()));
      ++i;
    }
    open.erase(open.begin());
  };
  std::mt19937 sizes(static_cast<unsigned>(channel));  // the same on all ranks
  for (int n = 0; n < count; ++n) {
    Open& next = open.emplace_back();
    next.tag = static_cast<std::uint64_t>(n) + 1;
    const std::size_t bytes = 1 + sizes() % 30'000;
    std::vector<Neighbours::Incoming> in;
    std::vector<Neighbours::Outgoing> out;
    next.in.reserve(ranks), next.out.reserve(ranks);
    for (int other = 0; other < ranks; ++other) {
      if (other == rank) continue;
      Bytes& to = next.in.emplace_back(bytes);
      const Bytes& from = next.out.emplace_back(content(rank, other, next.tag, bytes));
      in.push_back({other, to.data(), bytes});
      out.push_back({other, from.data(), bytes});
    }
    next.exchange = mine.exchange(channel, next.tag, std::move(in), std::move(out));
    if (open.size() > ahead) finish();
  }
  while (!open.empty()) finish();
}

std::shared_ptr<Neighbours::Exchange> swap_with(Neighbours& mine, int other, std::uint64_t tag, Bytes& in,
                                                const Bytes& out) {
  return mine.exchange(Channel::sums, tag, {{other, in.data(), in.size()}}, {{other, out.data(), out.size()}});
}

}  // namespace

TEST_CASE("neighbours read each other's parts, in both channels at once and far ahead") {
  for (const std::size_t ahead : {0, 3, 200}) {  // more than a board has places for
    const int count = 3;
    auto ranks = ranks_that_met(count);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
      for (const Channel channel : {Channel::gathers, Channel::sums}) {
        threads.emplace_back([&, rank, channel] { exchange_all(*ranks[rank], rank, count, channel, 300, ahead); });
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_CASE("neighbours at different operators get an error, and no byte") {
  auto ranks = ranks_that_met(2);
  Bytes in_0(100), in_1(100);
  const Bytes out(100, std::byte{7});
  const auto first = swap_with(*ranks[0], 1, 1, in_0, out), second = swap_with(*ranks[1], 0, 2, in_1, out);
  CHECK_THROWS_AS(first->wait(0ms), std::runtime_error);
  CHECK_THROWS_AS(second->wait(0ms), std::runtime_error);
  CHECK(in_0 == Bytes(100));
  CHECK(in_1 == Bytes(100));
  CHECK_THROWS_AS(swap_with(*ranks[0], 1, 3, in_0, out)->wait(0ms), std::runtime_error);  // nothing works any more
}

TEST_CASE("a neighbour that does not come ends the wait at the timeout, and others' waits with it") {
  auto ranks = ranks_that_met(3, 200ms);
  Bytes in(100), in_of_2(100);
  const Bytes out(100);
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH(swap_with(*ranks[0], 1, 1, in, out)->wait(0ms), doctest::Contains("rank 1 does not answer"));
  CHECK(std::chrono::steady_clock::now() - begin < 5s);
  CHECK_THROWS_WITH(swap_with(*ranks[2], 0, 1, in_of_2, out)->wait(0ms), doctest::Contains("rank 0 has failed"));
}

TEST_CASE("what a neighbour offered before it gave up is not read") {
  auto ranks = ranks_that_met(2);
  Bytes in_0(100), in_1(100), out_0(100, std::byte{1});
  const Bytes out_1(100, std::byte{2});
  CHECK_THROWS_AS(swap_with(*ranks[0], 1, 1, in_0, out_0)->wait(20ms), std::runtime_error);
  std::ranges::fill(out_0, std::byte{9});  // the memory is used for something else
  CHECK_THROWS_AS(swap_with(*ranks[1], 0, 1, in_1, out_1)->wait(0ms), std::runtime_error);
  CHECK(in_1 == Bytes(100));
  CHECK(in_0 == Bytes(100));
}

TEST_CASE("a neighbour that closes ends the waits for it") {
  auto ranks = ranks_that_met(2);
  Bytes in(100);
  const Bytes out(100);
  const auto exchange = swap_with(*ranks[0], 1, 1, in, out);
  std::thread closes([&] {
    std::this_thread::sleep_for(30ms);
    ranks[1] = nullptr;
  });
  CHECK_THROWS_WITH(exchange->wait(0ms), doctest::Contains("rank 1 has failed or closed"));
  closes.join();
}

TEST_CASE("the end of a neighbour's process ends the waits for it") {
  int to_parent[2], to_child[2];
  REQUIRE(::pipe(to_parent) == 0);
  REQUIRE(::pipe(to_child) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    Neighbours mine(1, 2, 1, 10s);
    const std::string said = mine.introduction();
    (void)!::write(to_parent[1], said.data(), said.size());
    char word = 0;
    (void)!::read(to_child[0], &word, 1);
    ::_exit(0);
  }
  Neighbours mine(0, 2, 1, 10s);
  std::vector<char> said(1000);
  const ssize_t length = ::read(to_parent[0], said.data(), said.size());
  REQUIRE(length > 0);
  REQUIRE(mine.meet(1, std::string(said.data(), static_cast<std::size_t>(length))) == Neighbours::Met::here);
  CHECK(mine.count() == 1);
  Bytes in(100);
  const Bytes out(100);
  const auto exchange = swap_with(mine, 1, 1, in, out);
  (void)!::write(to_child[1], "x", 1);
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH(exchange->wait(0ms), doctest::Contains("the process of rank 1 has ended"));
  CHECK(std::chrono::steady_clock::now() - begin < 5s);
  ::waitpid(child, nullptr, 0);
  for (const int file : {to_parent[0], to_parent[1], to_child[0], to_child[1]}) ::close(file);
}

TEST_CASE("a process of another host, or without a board, is no neighbour") {
  Neighbours mine(0, 2, 1, 1s);
  CHECK(mine.meet(1, "") == Neighbours::Met::elsewhere);
  CHECK(mine.meet(1, "another/host/here 1 2 3") == Neighbours::Met::elsewhere);
  CHECK(mine.count() == 0);
  CHECK(!mine.takes(1, 1 << 20));
}

TEST_CASE("a forked child cannot wait for an exchange, and leaves it to its parent") {
  auto ranks = ranks_that_met(2);
  Bytes in_0(100), in_1(100);
  const Bytes out_0(100, std::byte{1}), out_1(100, std::byte{2});
  const auto first = swap_with(*ranks[0], 1, 1, in_0, out_0);
  CHECK(in_forked_child([&] {
          try {
            first->wait(0ms);
            return 1;
          } catch (const std::runtime_error&) {
            return 0;
          }
        }) == 0);
  const auto second = swap_with(*ranks[1], 0, 1, in_1, out_1);
  first->wait(0ms);
  second->wait(0ms);
  CHECK(in_0 == out_1);
  CHECK(in_1 == out_0);
}
