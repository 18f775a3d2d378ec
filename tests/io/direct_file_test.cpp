#include "zeropage/io/direct_file.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "../forked_child.h"
#include "../temporary_directory.h"
#include "zeropage/base/errors.h"
#include "zeropage/io/arena.h"

using namespace zeropage;

namespace {

std::vector<std::byte> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// Notes what is started, and whether it goes past the page cache.
struct RecordingIo final : Io {
  struct Started {
    std::size_t offset, bytes, address;
    bool is_direct;
  };
  void start(const Transfer& transfer, Priority priority, Completion completion) override {
    started.push_back({transfer.offset, transfer.bytes, reinterpret_cast<std::size_t>(transfer.buffer),
                       (::fcntl(transfer.file->descriptor(), F_GETFL) & O_DIRECT) != 0});
    below->start(transfer, priority, std::move(completion));
  }
  void wait_all() override { below->wait_all(); }
  std::string_view name() const override { return "recording"; }
  std::vector<Started> started;
  std::unique_ptr<Io> below = make_io();
};

/// From now on the system refuses this process reads of one disk block, like a file system whose O_DIRECT needs
/// more. False if seccomp is not available.
bool refuse_reads_of_one_block() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pread64, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kBlockBytes, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
}

}  // namespace

TEST_CASE("ranges at any offset, from any address, are written and read as they are") {
  TemporaryDirectory directory;
  constexpr std::size_t kBytes = 300'000;
  const std::string path = directory.path() + "/file";
  Arena arena(kMiB);
  for (const IoEngine engine : {IoEngine::threads, IoEngine::automatic}) {
    const auto io = make_io({.engine = engine, .block_bytes = 64 * kKiB});
    const DirectFile file = DirectFile::create(path, kBytes);
    auto expected = random_bytes(kBytes, 1);
    file.start(*io, Direction::write, 0, expected.data(), kBytes).wait();
    const Block block = *arena.try_allocate(kBytes + kBlockBytes);
    std::mt19937 random(2);
    for (int round = 0; round < 200; ++round) {
      const std::size_t offset = random() % kBytes, bytes = random() % (kBytes - offset + 1);
      const std::size_t shift = round % 2 ? offset % kBlockBytes : random() % kBlockBytes;  // direct, and not
      std::byte* const buffer = block.data() + shift;
      if (round % 4 < 2) {
        const auto data = random_bytes(bytes, round);
        std::memcpy(buffer, data.data(), bytes);
        std::memcpy(expected.data() + offset, data.data(), bytes);
        file.start(*io, Direction::write, offset, buffer, bytes).wait();
      } else {
        std::memset(buffer, 0, bytes);
        file.start(*io, Direction::read, offset, buffer, bytes).wait();
        REQUIRE(std::memcmp(buffer, expected.data() + offset, bytes) == 0);
      }
    }
    const DirectFile again = DirectFile::open(path);
    std::vector<std::byte> whole(kBytes);
    again.start(*io, Direction::read, 0, whole.data(), kBytes).wait();
    CHECK(whole == expected);
    CHECK(again.size() == kBytes);
    CHECK_THROWS_WITH_AS((void)again.start(*io, Direction::write, 0, whole.data(), 1),
                         doctest::Contains("opened for reading"), DiskError);
  }
}

TEST_CASE("a range past the end of its file is an error that names the file and the offset") {
  TemporaryDirectory directory;
  const auto io = make_io();
  const DirectFile file = DirectFile::create(directory.path() + "/short", 10'000);
  Arena arena(kMiB);
  const Block block = *arena.try_allocate(64 * kKiB);
  for (const std::size_t bytes : {16 * kKiB, std::size_t{12'000}}) {
    Ticket ticket = file.start(*io, Direction::read, 4 * kKiB, block.data(), bytes);
    CHECK_THROWS_WITH_AS(ticket.wait(), doctest::Contains("/short"), DiskError);
  }
}

TEST_CASE("a part that cannot start ends the whole ticket with its error, once the others have ended") {
  TemporaryDirectory directory;
  struct Refusing final : Io {
    void start(const Transfer& transfer, Priority priority, Completion completion) override {
      if (++started == 2) throw DiskError("refused");
      below->start(transfer, priority, std::move(completion));
    }
    void wait_all() override { below->wait_all(); }
    std::string_view name() const override { return "refusing"; }
    int started = 0;
    std::unique_ptr<Io> below = make_io();
  } io;
  const DirectFile file = DirectFile::create(directory.path() + "/file", 100'000);
  Arena arena(kMiB);
  const Block block = *arena.try_allocate(64 * kKiB);
  Ticket ticket = file.start(io, Direction::read, 1, block.data() + 1, 20'000);
  CHECK_THROWS_WITH_AS(ticket.wait(), "refused", DiskError);
}

TEST_CASE("whole disk blocks go past the page cache, and only what shares one goes through it") {
  TemporaryDirectory directory;
  RecordingIo io;
  const DirectFile file = DirectFile::create(directory.path() + "/file", 200'000);
  REQUIRE(file.is_direct());
  Arena arena(kMiB);
  const Block block = *arena.try_allocate(256 * kKiB);
  const auto at = [&](std::size_t shift) { return block.data() + shift; };
  for (const Direction direction : {Direction::write, Direction::read}) {
    io.started.clear();
    file.start(io, direction, 8 * kKiB, at(0), 64 * kKiB).wait();
    REQUIRE(io.started.size() == 1);
    CHECK(io.started[0].is_direct);
    CHECK(io.started[0].bytes == 64 * kKiB);

    io.started.clear();
    file.start(io, direction, 1'000, at(1'000), 100'000).wait();
    REQUIRE(io.started.size() == 3);
    std::size_t direct = 0, cached = 0;
    for (const auto& part : io.started) {
      if (!part.is_direct) {
        CHECK(part.bytes < kBlockBytes);
        cached += part.bytes;
        continue;
      }
      CHECK(part.offset % kBlockBytes == 0);
      CHECK(part.bytes % kBlockBytes == 0);
      CHECK(part.address % kBlockBytes == 0);
      direct += part.bytes;
    }
    CHECK(direct == round_down(std::size_t{101'000}, kBlockBytes) - kBlockBytes);
    CHECK(direct + cached == 100'000);

    io.started.clear();
    file.start(io, direction, 1'000, at(0), 100'000).wait();  // no address of it suits the disk
    REQUIRE(io.started.size() == 1);
    CHECK_FALSE(io.started[0].is_direct);
  }
}

TEST_CASE("where O_DIRECT can be opened and every transfer is refused, all goes through the page cache") {
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/file";
  const auto data = random_bytes(100'000, 1);
  File::create(path, data.size()).write(0, data.data(), data.size());
  constexpr int kCannotTell = 3;
  const int result = in_forked_child([&] {
    if (!refuse_reads_of_one_block()) return kCannotTell;
    return DirectFile::open(path).is_direct() ? 1 : 0;
  });
  if (result == kCannotTell) return;
  CHECK(result == 0);
  CHECK(DirectFile::open(path).is_direct());
}

TEST_CASE("a ticket that has not ended by its deadline is waited for again") {
  auto [ticket, completion] = Ticket::pending();
  CHECK_FALSE(ticket.wait_until(std::chrono::steady_clock::now() + std::chrono::milliseconds(5)));
  CHECK_FALSE(ticket.done());
  completion(nullptr);
  CHECK(ticket.wait_until(std::chrono::steady_clock::now()));
  CHECK(ticket.done());
}

TEST_CASE("sizes and numbers of requests that cannot be are refused") {
  CHECK_THROWS_WITH_AS(make_io({.block_bytes = 1000}), doctest::Contains("multiple of 4 KiB"), ConfigError);
  CHECK_THROWS_AS(make_io({.block_bytes = 0}), ConfigError);
  CHECK_THROWS_AS(make_io({.depth = 5000}), ConfigError);
  for (const IoEngine engine : {IoEngine::threads, IoEngine::automatic}) {
    const auto io = make_io({.engine = engine, .block_bytes = 4 * kKiB, .depth = 1});
    TemporaryDirectory directory;
    const DirectFile file = DirectFile::create(directory.path() + "/file", 100'000);
    std::vector<std::byte> data(100'000);
    file.start(*io, Direction::read, 0, data.data(), data.size(), Priority::ahead).wait();
    file.start(*io, Direction::write, 0, data.data(), data.size(), Priority::background).wait();
  }
}
