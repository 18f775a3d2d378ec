#include "zeropage/plan/machine.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "pager/random_program.h"
#include "zeropage/base/clock.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

namespace {

double seconds(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

/// A hollow cache on a machine of round numbers: 1 MiB takes a millisecond to read, and two to write.
struct PlanFixture {
  std::shared_ptr<Machine> machine;
  std::unique_ptr<VirtualClock::Entered> entered;
  std::shared_ptr<FrameCache> cache;

  void make(std::size_t device_bytes, std::size_t host_bytes, std::size_t disk_bytes = std::size_t{1} << 40) {
    MachineSpeeds speeds;
    speeds.disk_read = kMiB / 1e-3, speeds.disk_write = kMiB / 2e-3, speeds.disk_latency = 0;
    speeds.disk_bytes = disk_bytes;
    entered.reset();
    machine = std::make_shared<Machine>(speeds);
    entered = std::make_unique<VirtualClock::Entered>(machine->clock);
    CacheOptions options{
        .device_bytes = device_bytes, .host_bytes = host_bytes, .disk_path = "nowhere", .page_bytes = kMiB};
    options.hollow = {disk_bytes, 1e15};
    cache = FrameCache::make(options, make_planned_io(machine, options.io));
  }
  ~PlanFixture() { cache.reset(); }

  std::unique_ptr<TestSegment> segment(std::size_t bytes) {
    auto made = std::make_unique<TestSegment>();
    cache->bind(*made, {bytes, 0, Role::parameter, Tier::disk});
    return made;
  }
  void use(TestSegment& segment, Access access, double computes = 0) {
    const PinRequest request{&segment, access};
    cache->pin({&request, 1});
    machine->compute(computes);
    cache->unpin({&request, 1});
  }
  double now() const { return seconds(machine->clock.now()); }
};

}  // namespace

TEST_CASE("events run when the clock reaches them, in their order, and those of one time as they were asked for") {
  VirtualClock clock;
  std::string ran;
  clock.at(VirtualClock::after({}, 2), [&] { ran += 'c'; });
  clock.at(VirtualClock::after({}, 1), [&] {
    ran += 'a';
    clock.at(VirtualClock::after(clock.now(), 0.5), [&] { ran += 'b'; });
  });
  clock.at(VirtualClock::after({}, 2), [&] { ran += 'd'; });
  clock.advance(1.75);
  CHECK(ran == "ab");
  CHECK(seconds(clock.now()) == doctest::Approx(1.75));
  CHECK(clock.run_next());
  CHECK(seconds(clock.now()) == doctest::Approx(2));
  while (clock.run_next()) {
  }
  CHECK(ran == "abcd");
}

TEST_CASE("an event that is postponed runs at the next wait, and not in the one under way") {
  VirtualClock clock;
  int tries = 0;
  std::function<void()> event = [&] {
    if (++tries < 3) clock.postpone(event);
  };
  clock.at({}, event);
  clock.advance(1);
  CHECK(tries == 1);
  clock.advance(0);
  CHECK(tries == 2);
  CHECK(clock.run_next());
  CHECK(tries == 3);
  CHECK_FALSE(clock.run_next());
}

TEST_CASE("time is real on threads that have not entered a clock") {
  const auto before = Clock::now();
  {
    VirtualClock clock;
    const VirtualClock::Entered entered(clock);
    CHECK(seconds(Clock::now()) == 0);
  }
  CHECK(Clock::now() >= before);
}

TEST_CASE_FIXTURE(PlanFixture, "a cold read is waited for as long as the disk takes") {
  make(8 * kMiB, 0);
  auto a = segment(4 * kMiB), b = segment(8 * kMiB);
  use(*a, Access::overwrite);
  use(*b, Access::overwrite);  // a is written first: 4 MiB at 2 ms
  CHECK(now() == doctest::Approx(8e-3));
  use(*a, Access::read);  // b is written, a is read
  CHECK(now() == doctest::Approx(8e-3 + 16e-3 + 4e-3));
  CHECK(cache->stats().read_bytes == 4 * kMiB);
  CHECK(cache->stats().written_bytes == 12 * kMiB);
  const BookedTime::Seconds spent = cache->stats().spent;
  CHECK(std::accumulate(spent.begin(), spent.end(), 0.0) == doctest::Approx(now()));
}

TEST_CASE_FIXTURE(PlanFixture,
                  "what the plan knows is read under compute, and costs nothing if that is long enough") {
  make(8 * kMiB, 0);
  std::vector<std::unique_ptr<TestSegment>> layers;
  for (int i = 0; i < 8; ++i) layers.push_back(segment(2 * kMiB));
  for (auto& layer : layers) use(*layer, Access::overwrite);
  const auto go_through = [&](double computes) {
    const double before = now();
    for (auto& layer : layers) use(*layer, Access::read, computes);
    return now() - before;
  };
  for (int i = 0; i < 3; ++i) go_through(4e-3);
  CHECK(go_through(4e-3) == doctest::Approx(8 * 4e-3));  // reads take 2 ms a layer
  for (int i = 0; i < 3; ++i) go_through(1e-3);
  CHECK(go_through(1e-3) >= doctest::Approx(8 * 1e-3 + 4e-3));  // bound by the disk
  CHECK(go_through(1e-3) <= doctest::Approx(8 * 2e-3 + 2e-3));
}

TEST_CASE_FIXTURE(PlanFixture, "the same run takes the same time to the last bit") {
  const auto run = [&] {
    make(8 * kMiB, 0);
    std::vector<std::unique_ptr<TestSegment>> all;
    for (int i = 0; i < 12; ++i) all.push_back(segment((1 + i % 4) * kMiB));
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < 12; ++i) use(*all[i * 5 % 12], i % 3 ? Access::read : Access::write, 1e-4 * i);
    }
    const auto end = machine->clock.now();
    all.clear();
    cache.reset();
    entered.reset();
    return end;
  };
  const auto first = run();
  CHECK(run() == first);
}

TEST_CASE_FIXTURE(PlanFixture, "a planned disk that is full says what it holds and what was asked of it") {
  make(8 * kMiB, 0, 6 * kMiB);
  auto a = segment(4 * kMiB);
  CHECK_THROWS_WITH_AS(segment(4 * kMiB), doctest::Contains("planned disk"), DiskError);
  CHECK(cache->swap_bytes() == 4 * kMiB);
}

TEST_CASE_FIXTURE(PlanFixture, "a hollow cache takes no memory") {
  make(std::size_t{64} << 30, std::size_t{64} << 30);
  auto a = segment(std::size_t{16} << 30);
  use(*a, Access::overwrite);
  use(*a, Access::read);
  CHECK(cache->usage(Pool::device).peak == std::size_t{16} << 30);
}

TEST_CASE_FIXTURE(PlanFixture, "while the program stands still, what is read ahead comes to rest") {
  constexpr std::size_t kMemory = 48 * kMiB;
  std::size_t most = 0;
  for (const unsigned most_members : {3u, 24u, 150u}) {
    for (unsigned seed = 0; seed < 40; ++seed) {
      make(kMemory, 0);
      RandomProgram program(*cache, kMiB, seed, most_members);
      for (int step = 0; step < 4; ++step) {
        for (const auto& group : program.groups()) {
          program.run(group);
          CAPTURE(seed);
          CAPTURE(most_members);
          const auto before = cache->stats();
          for (int event = 0; machine->clock.run_next(); ++event) REQUIRE(event < 20'000);
          most = std::max(most, cache->stats().read_bytes - before.read_bytes);
        }
      }
    }
  }
  CHECK(most <= kMemory / 2);
}
