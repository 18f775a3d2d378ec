#include "zeropage/io/transfer_queue.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "zeropage/base/units.h"

using namespace zeropage;

namespace {

/// A queue of blocks of 4 KiB, whose transfers are named by the place of their buffer: a, b, ...
struct Queue {
  TransferQueue queue{1000, kBlockBytes};
  std::vector<std::byte> memory = std::vector<std::byte>(26 * kBlockBytes);

  void push(char name, Priority priority, std::size_t blocks = 1, Direction direction = Direction::read) {
    queue.push(std::make_shared<TransferState>(Transfer{direction, nullptr, 0, at(name), blocks * kBlockBytes},
                                               [](std::exception_ptr) {}),
               priority);
  }
  std::byte* at(char name) { return memory.data() + (name - 'a') * kBlockBytes; }
  void expedite(char first, char last) {
    queue.expedite({at(first), static_cast<std::size_t>(at(last) - at(first)) + 1});
  }
  std::string order() {
    std::string names;
    while (auto request = queue.drain()) {
      names += static_cast<char>('a' + (request->buffer - memory.data()) / kBlockBytes);
      if (--request->state->requests_left == 0) queue.finished(*request->state);
    }
    return names;
  }
};

}  // namespace

TEST_CASE("what a thread waits for goes first, reads and writes of every priority alike") {
  Queue queue;
  for (const char name : {'a', 'b', 'c'}) queue.push(name, Priority::behind, 1, Direction::write);
  for (const char name : {'d', 'e', 'f'}) queue.push(name, Priority::ahead);
  for (const char name : {'g', 'h', 'i'}) queue.push(name, Priority::background, 1, Direction::write);
  queue.push('j', Priority::demanded);
  queue.expedite('h', 'h');
  queue.expedite('b', 'b');
  queue.expedite('e', 'f');
  CHECK(queue.order() == "jhbefdacgi");
}

TEST_CASE("a transfer that has begun is expedited for its rest, and one that has ended not at all") {
  Queue queue;
  queue.push('a', Priority::behind, 3);
  queue.push('e', Priority::behind, 1);
  auto first = queue.queue.pop();
  REQUIRE(first);
  queue.push('d', Priority::demanded);
  queue.expedite('a', 'a');
  CHECK(queue.order() == "dbce");
  queue.expedite('a', 'z');
  CHECK(queue.order().empty());
}

TEST_CASE("what begins before the memory or behind it is not expedited") {
  Queue queue;
  for (const char name : {'a', 'b', 'c'}) queue.push(name, Priority::ahead, 2);
  queue.queue.expedite({queue.at('b') + 1, kBlockBytes - 1});
  queue.queue.expedite({queue.at('b'), 0});
  CHECK(queue.order() == "abbccd");
}

TEST_CASE("hundreds of thousands of transfers are expedited one by one in a moment") {
  TransferQueue queue(1, kBlockBytes);
  constexpr std::size_t kCount = 300'000;
  std::vector<std::byte> memory(kCount);
  for (std::byte& byte : memory) {
    queue.push(
        std::make_shared<TransferState>(Transfer{Direction::write, nullptr, 0, &byte, 1}, [](std::exception_ptr) {}),
        Priority::behind);
  }
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = kCount; i-- > 0;) queue.expedite({&memory[i], 1});
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
  CHECK(queue.pop()->buffer == &memory.back());
}
