#include "zeropage/io/io.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <future>
#include <latch>
#include <random>
#include <thread>

#include "forbidden_calls.h"
#include "forked_child.h"
#include "memory_shortage.h"
#include "temporary_directory.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/io/arena.h"
#include "zeropage/io/transfer_queue.h"

using namespace zeropage;

namespace {

std::vector<std::unique_ptr<Io>> engines() {
  std::vector<std::unique_ptr<Io>> engines;
  engines.push_back(make_io({.engine = IoEngine::threads}));
  engines.push_back(make_io());
  return engines;
}

void fill_random(Block& block, unsigned seed) {
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i + 8 <= block.bytes(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(block.data() + i, &word, 8);
  }
}

/// Whether a transfer ends, for tests in which it may not.
class Ending {
 public:
  Ending(Io& io, const Transfer& transfer) {
    io.start(transfer, Priority::demanded, [state = state_](std::exception_ptr error) {
      std::lock_guard lock(state->mutex);
      state->failed = error != nullptr;
      state->came = true;
      state->changed.notify_all();
    });
  }
  bool came(std::chrono::milliseconds within = std::chrono::seconds(10)) {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, within, [&] { return state_->came; });
  }
  bool failed() const { return state_->failed; }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool came = false, failed = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// How often this process has given up the CPU.
long pauses() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nvcsw;
}

}  // namespace

TEST_CASE("what was written is read, for sizes of one block to many requests") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    CAPTURE(io->name());
    File file = File::make_unnamed(directory.path());
    Arena arena(64 * kMiB);
    for (std::size_t bytes : {kBlockBytes, kMiB, kMiB + kBlockBytes, 9 * kMiB}) {
      auto out = arena.try_allocate(bytes), in = arena.try_allocate(bytes);
      fill_random(*out, static_cast<unsigned>(bytes));
      io->submit({Direction::write, &file, 3 * kBlockBytes, out->data(), bytes}).wait();
      Ticket read = io->submit({Direction::read, &file, 3 * kBlockBytes, in->data(), bytes});
      read.wait();
      CHECK(read.done());
      CHECK(std::memcmp(in->data(), out->data(), bytes) == 0);
    }
    io->sync(file);
  }
}

TEST_CASE("more transfers than the queue holds all complete, in any order of waiting") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    CAPTURE(io->name());
    File file = File::make_unnamed(directory.path());
    Arena arena(32 * kMiB);
    constexpr std::size_t kCount = 500, kBytes = 4 * kBlockBytes;
    auto out = arena.try_allocate(kCount * kBytes), in = arena.try_allocate(kCount * kBytes);
    fill_random(*out, 1);
    std::vector<Ticket> tickets;
    for (std::size_t i = 0; i < kCount; ++i) {
      tickets.push_back(io->submit({Direction::write, &file, i * kBytes, out->data() + i * kBytes, kBytes}));
    }
    for (std::size_t i = kCount; i-- > 0;) tickets[i].wait();
    tickets.clear();
    for (std::size_t i = 0; i < kCount; ++i) {
      tickets.push_back(io->submit({Direction::read, &file, i * kBytes, in->data() + i * kBytes, kBytes}));
    }
    io->wait_all();
    for (Ticket& ticket : tickets) {
      CHECK(ticket.done());
      ticket.wait();
    }
    CHECK(std::memcmp(in->data(), out->data(), kCount * kBytes) == 0);
  }
}

TEST_CASE("reading past the end is an error that names the file and the sizes, never data") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    CAPTURE(io->name());
    File file = File::make_unnamed(directory.path());
    Arena arena(8 * kMiB);
    auto block = arena.try_allocate(2 * kMiB);
    io->submit({Direction::write, &file, 0, block->data(), kMiB}).wait();
    Ticket ticket = io->submit({Direction::read, &file, 0, block->data(), 2 * kMiB});
    CHECK_THROWS_WITH_AS(ticket.wait(), doctest::Contains("only 1.0 MB were transferred"), DiskError);
  }
}

TEST_CASE("a write that the system refuses is an error with its reason, and later transfers are unharmed") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    CAPTURE(io->name());
    const std::string name = directory.path() + "/read-only";
    File made(::open(name.c_str(), O_RDWR | O_CREAT, 0600), name);
    File file(::open(name.c_str(), O_RDONLY), name);
    Arena arena(8 * kMiB);
    auto block = arena.try_allocate(kMiB);
    Ticket refused = io->submit({Direction::write, &file, 0, block->data(), kMiB});
    CHECK_THROWS_WITH_AS(refused.wait(), doctest::Contains("Bad file descriptor"), DiskError);
    io->submit({Direction::write, &made, 0, block->data(), kMiB}).wait();
  }
}

TEST_CASE("a ticket that is dropped is waited for, so that its buffer is free") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    File file = File::make_unnamed(directory.path());
    Arena arena(8 * kMiB);
    auto block = arena.try_allocate(4 * kMiB);
    { Ticket dropped = io->submit({Direction::write, &file, 0, block->data(), 4 * kMiB}); }
    auto back = arena.try_allocate(4 * kMiB);
    io->submit({Direction::read, &file, 0, back->data(), 4 * kMiB}).wait();
    CHECK(std::memcmp(back->data(), block->data(), 4 * kMiB) == 0);
  }
}

TEST_CASE("while a thread waits for a ticket the transfer is under way for all, and several may wait") {
  auto pending = Ticket::pending();
  Ticket& ticket = pending.first;
  std::atomic<int> returned{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&] { ticket.wait(), ++returned; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_FALSE(ticket.done());
  CHECK_FALSE(ticket.wait_until(std::chrono::steady_clock::now()));
  CHECK(returned == 0);
  pending.second(nullptr);
  for (auto& thread : threads) thread.join();
  CHECK(ticket.done());
}

TEST_CASE("a transfer that failed is an error at every wait") {
  auto [ticket, completion] = Ticket::pending();
  completion(std::make_exception_ptr(DiskError("failed")));
  for (int i = 0; i < 2; ++i) {
    CHECK_THROWS_WITH_AS(ticket.wait(), "failed", DiskError);
    CHECK_THROWS_WITH_AS(ticket.wait_until(std::chrono::steady_clock::now()), "failed", DiskError);
    CHECK(ticket.done());
  }
}

TEST_CASE("a forked child gets an error where it would wait for ever, and leaves its parent's transfers alone") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    CAPTURE(io->name());
    File file = File::make_unnamed(directory.path());
    Arena arena(8 * kMiB);
    auto block = arena.try_allocate(kMiB);
    Ticket ended = io->submit({Direction::write, &file, 0, block->data(), kMiB});
    ended.wait();
    auto under_way = Ticket::pending();
    const int wrong = in_forked_child([&] {
      int wrong = 0;
      wrong += !throws<AccessError>([&] { (void)io->submit({Direction::read, &file, 0, block->data(), kMiB}); });
      wrong += !throws<AccessError>([&] { io->wait_all(); });
      io->expedite({block->data(), kMiB});
      ended.wait();
      wrong += !throws<AccessError>([&] { under_way.first.wait(); });
      wrong += !under_way.first.done();
      { const Ticket dropped = std::move(under_way.first); }
      { const Ticket dropped = std::move(ended); }
      io.reset();
      return wrong;
    });
    CHECK(wrong == 0);
    under_way.second(nullptr);
    under_way.first.wait();
    io->submit({Direction::read, &file, 0, block->data(), kMiB}).wait();
  }
}

TEST_CASE("threads may submit and wait at once") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    CAPTURE(io->name());
    File file = File::make_unnamed(directory.path());
    Arena arena(32 * kMiB);
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (std::size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        auto out = arena.try_allocate(2 * kMiB), in = arena.try_allocate(2 * kMiB);
        for (unsigned round = 0; round < 10; ++round) {
          fill_random(*out, round * 4 + static_cast<unsigned>(t));
          io->submit({Direction::write, &file, t * 2 * kMiB, out->data(), 2 * kMiB}).wait();
          io->submit({Direction::read, &file, t * 2 * kMiB, in->data(), 2 * kMiB}).wait();
          wrong += std::memcmp(in->data(), out->data(), 2 * kMiB) != 0;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
  }
}

TEST_CASE("a transfer of no bytes ends") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    CAPTURE(io->name());
    File file = File::make_unnamed(directory.path());
    Arena arena(8 * kMiB);
    auto block = arena.try_allocate(kBlockBytes);
    Ending ending(*io, {Direction::write, &file, 0, block->data(), 0});
    REQUIRE(ending.came());
    CHECK_FALSE(ending.failed());
  }
}

TEST_CASE(
    "when the kernel takes no requests any more, all that were started end: with errors, and in flight as it says") {
  std::string why;
  auto io = make_ring({}, why);
  if (!io) return;  // not built, or not allowed here
  TemporaryDirectory directory;
  File file = File::make_unnamed(directory.path());
  Arena arena(8 * kMiB);
  auto block = arena.try_allocate(4 * kMiB);
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  File pipe(ends[0], "a pipe");
  Ending in_flight(*io, {Direction::read, &pipe, 0, block->data(), kBlockBytes});
  Ending before(*io, {Direction::write, &file, 0, block->data() + kMiB, kMiB});
  REQUIRE(before.came());
  // As a program that closes all files does.
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code none;
    if (std::filesystem::read_symlink(entry, none) != "anon_inode:[io_uring]") continue;
    const int null = ::open("/dev/null", O_RDWR);
    ::dup2(null, std::stoi(entry.path().filename()));
    ::close(null);
  }
  Ending after(*io, {Direction::write, &file, 0, block->data() + kMiB, 3 * kMiB});
  CHECK(after.came());
  CHECK(after.failed());
  CHECK_FALSE(in_flight.came(std::chrono::milliseconds(50)));  // the kernel may still write to its buffer
  CHECK_THROWS_WITH_AS(io->submit({Direction::write, &file, 0, block->data(), kMiB}),
                       doctest::Contains("io_uring refuses requests"), DiskError);
  ::close(ends[1]);
  REQUIRE(in_flight.came());
  CHECK(in_flight.failed());
  io->wait_all();
}

TEST_CASE("while a completion takes its time, the disk does what is queued behind") {
  std::string why;
  auto io = make_ring({.depth = 1}, why);
  if (!io) return;  // not built, or not allowed here
  TemporaryDirectory directory;
  File file = File::make_unnamed(directory.path());
  Arena arena(8 * kMiB);
  auto block = arena.try_allocate(2 * kBlockBytes);
  std::fill_n(block->data(), block->bytes(), std::byte{7});
  std::promise<bool> was_written;
  std::promise<void> both_queued;
  io->start({Direction::write, &file, 0, block->data(), kBlockBytes}, Priority::demanded,
            [&](std::exception_ptr) { both_queued.get_future().wait(); });
  io->start({Direction::write, &file, 0, block->data(), kBlockBytes}, Priority::demanded, [&](std::exception_ptr) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (file.size() < 2 * kBlockBytes && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    was_written.set_value(file.size() == 2 * kBlockBytes);
  });
  Ending second(*io, {Direction::write, &file, kBlockBytes, block->data(), kBlockBytes});
  both_queued.set_value();
  CHECK(was_written.get_future().get());
  CHECK(second.came());
}

TEST_CASE("waiting for all transfers waits for those started before, though others go on for ever") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    CAPTURE(io->name());
    File file = File::make_unnamed(directory.path());
    Arena arena(8 * kMiB);
    auto block = arena.try_allocate(kBlockBytes);
    const Transfer transfer{Direction::write, &file, 0, block->data(), kBlockBytes};
    std::atomic<bool> stops = false;
    std::latch chains(3);
    std::function<void(std::exception_ptr)> again = [&](std::exception_ptr) {
      if (stops) return chains.count_down();
      io->start(transfer, Priority::demanded, again);
    };
    for (int i = 0; i < 3; ++i) io->start(transfer, Priority::demanded, again);
    auto waited = std::async(std::launch::async, [&] { io->sync(file); });
    CHECK(waited.wait_for(std::chrono::seconds(10)) == std::future_status::ready);
    stops = true;
    waited.get();
    // Waiting for all would not: a transfer that one of them starts may begin after that call.
    chains.wait();
    io->wait_all();
  }
}

TEST_CASE("threads sleep while there is nothing for them to do") {
  auto io = make_io({.engine = IoEngine::threads});
  TemporaryDirectory directory;
  File file = File::make_unnamed(directory.path());
  Arena arena(8 * kMiB);
  auto block = arena.try_allocate(kMiB);
  const long before = pauses();
  for (int i = 0; i < 200; ++i) io->submit({Direction::write, &file, 0, block->data(), kBlockBytes}).wait();
  CHECK(pauses() - before < 200 * 6);
  // A background transfer waits while another is under way.
  std::promise<void> end;
  io->start({Direction::write, &file, 0, block->data(), kMiB}, Priority::demanded,
            [waits = end.get_future().share()](std::exception_ptr) { waits.wait(); });
  Ticket behind = io->submit({Direction::write, &file, 0, block->data(), kMiB}, Priority::background);
  const long asleep = pauses();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(pauses() - asleep < 300);
  end.set_value();
  behind.wait();
}

TEST_CASE("transfers end on a thread that gets no memory, with an error if they failed") {
  TemporaryDirectory directory;
  for (auto& io : engines()) {
    CAPTURE(io->name());
    File file = File::make_unnamed(directory.path());
    Arena arena(64 * kMiB);
    auto block = arena.try_allocate(32 * kMiB);
    io->submit({Direction::write, &file, 0, block->data(), 32 * kMiB}).wait();
    std::vector<Ticket> tickets;
    for (std::size_t i = 0; i < 32; ++i) {
      auto [ticket, ends] = Ticket::pending();
      io->start({Direction::read, &file, i * kMiB, block->data() + i * kMiB, kMiB}, Priority::demanded,
                [ends](std::exception_ptr error) {
                  thread_local std::unique_ptr<MemoryShortage> shortage;
                  if (!shortage) shortage = std::make_unique<MemoryShortage>();
                  ends(std::move(error));
                });
      tickets.push_back(std::move(ticket));
    }
    for (Ticket& ticket : tickets) ticket.wait();
    CHECK_THROWS(io->submit({Direction::read, &file, 31 * kMiB + kBlockBytes, block->data(), kMiB}).wait());
  }
}

#ifndef __SANITIZE_THREAD__  // it allows no threads in a forked child
TEST_CASE("a system that allows a ring but no requests to it gets threads, and one without threads an error") {
  const int without_requests = in_forked_child([] {
    if (!forbid(__NR_io_uring_enter)) return 0;
    TemporaryDirectory directory;
    File file = File::make_unnamed(directory.path());
    Arena arena(8 * kMiB);
    auto block = arena.try_allocate(kMiB);
    auto io = make_io();
    if (io->name() != "threads") return 1;
    io->submit({Direction::write, &file, 0, block->data(), kMiB}).wait();
    return 0;
  });
  CHECK(without_requests == 0);
  const int without_threads = in_forked_child([] {
    if (!forbid(__NR_clone, __NR_clone3)) return 0;
    return throws<Error>([] { (void)make_io(); }) ? 0 : 1;
  });
  CHECK(without_threads == 0);
}
#endif
