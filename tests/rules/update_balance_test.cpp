#include "zeropage/rules/update_balance.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

using namespace zeropage;

namespace {

/// A program whose updates take `on_disk` seconds a step on the disk. Forward and backward each take the longer of
/// the time for which they compute and the disk's time for the updates that run under them.
struct Steps {
  double on_disk, forward, backward;
  double in_forward = 0, in_backward = 0;                               // what they themselves take of the disk
  double idle_in_forward = 0, idle_in_backward = 0;                     // at their begins
  std::vector<std::size_t> bytes = std::vector<std::size_t>(50, 1000);  // of the parameters, as backward reaches them
  UpdateBalance balance = {};
  double now = 0, waited = 0, idle = 0;
  double before = 1;                  // the share that the latest backward updated
  std::size_t early = 0, clocks = 0;  // parameters that it updated; calls of the clock in the latest step

  void step() {
    const auto clock = [&] { return ++clocks, Moment{now, waited, idle}; };
    early = clocks = 0;
    now += idle_in_forward, idle += idle_in_forward;
    run(forward - idle_in_forward, in_forward + on_disk * (1 - before));
    double taken = 0, all = 0;
    for (const std::size_t n : bytes) {
      const bool takes = balance.takes(n, true, clock);
      early += takes, taken += takes ? n : 0, all += n;
    }
    before = taken / all;
    now += idle_in_backward, idle += idle_in_backward;
    run(backward - idle_in_backward, in_backward + on_disk * before);
    for (std::size_t i = 0; i < bytes.size(); ++i) balance.step(clock);
  }
  void run(double computes, double moves) {
    now += std::max(computes, moves);
    waited += std::max(moves - computes, 0.0);
    idle += std::max(computes - moves, 0.0);
  }
  double seconds_of_a_step() {
    const double start = now;
    step();
    return now - start;
  }
};

}  // namespace

TEST_CASE("updates that backward hides stay there") {
  Steps steps{.on_disk = 1, .forward = 1, .backward = 2};
  for (int i = 0; i < 20; ++i) steps.step();
  CHECK(steps.early == 50);
}

TEST_CASE("updates are divided so that the disk is idle neither in forward nor in backward") {
  for (const double on_disk : {2.5, 4.0, 8.0}) {
    Steps steps{.on_disk = on_disk, .forward = 1, .backward = 2};
    for (int i = 0; i < 30; ++i) steps.step();
    const double least = std::max(3.0, on_disk);  // seconds, if it never is
    CHECK(steps.seconds_of_a_step() < 1.04 * least);
    const std::size_t divided = steps.early;
    for (int i = 0; i < 30; ++i) {
      steps.step();
      CHECK(steps.early == divided);  // each change would be a surprise to the plan
    }
  }
}

TEST_CASE("a large parameter that no division suits does not change its pass for ever") {
  Steps steps{.on_disk = 2.4, .forward = 0.5, .backward = 2, .bytes = {69'000, 31'000}};
  for (int i = 0; i < 40; ++i) steps.step();
  std::size_t changes = 0;
  for (int i = 0; i < 40; ++i) {
    const std::size_t before = steps.early;
    steps.step();
    changes += steps.early != before;
  }
  CHECK(changes <= 4);
}

TEST_CASE("parameters that cannot run early this time leave the others where they are") {
  Steps steps{.on_disk = 6, .forward = 1, .backward = 2};
  for (int i = 0; i < 30; ++i) steps.step();
  steps.run(steps.forward, steps.on_disk * (1 - steps.before));
  const auto clock = [&] { return Moment{steps.now, steps.waited, steps.idle}; };
  std::size_t taken = 0;
  for (std::size_t i = 0; i < 50; ++i) taken += steps.balance.takes(1000, i >= 10, clock);
  CHECK(taken == steps.early - 10);
}

TEST_CASE("the clock is read once a backward and once a step, however many parameters there are") {
  Steps steps{.on_disk = 6, .forward = 1, .backward = 2};
  for (int i = 0; i < 3; ++i) steps.step();
  CHECK(steps.clocks == 2);
}

TEST_CASE("updates come back to backward when it has time again") {
  Steps steps{.on_disk = 6, .forward = 1, .backward = 2};
  for (int i = 0; i < 30; ++i) steps.step();
  CHECK(steps.early < 45);
  steps.on_disk = 1.5;
  steps.forward = 0.1;
  for (int i = 0; i < 60; ++i) steps.step();
  CHECK(steps.seconds_of_a_step() < 1.04 * 2.1);
}

TEST_CASE("other work between two steps moves no update") {
  Steps steps{.on_disk = 4, .forward = 1, .backward = 2};
  for (int i = 0; i < 30; ++i) steps.step();
  const std::size_t divided = steps.early;
  for (int i = 0; i < 30; ++i) {
    if (i % 3 == 0) steps.now += 5, steps.idle += 5;  // an evaluation
    steps.step();
    CHECK(steps.early == divided);
  }
}

TEST_CASE("updates stay in backward if the disk is busy in forward too") {
  // Forward's own pages take the disk as long as forward computes.
  Steps steps{.on_disk = 4, .forward = 1, .backward = 2, .in_forward = 1};
  for (int i = 0; i < 20; ++i) steps.step();
  CHECK(steps.early == 50);
}

TEST_CASE("backward takes more if the disk is idle in it, although the program waits there too") {
  Steps steps{.on_disk = 4, .forward = 1, .backward = 2};
  for (int i = 0; i < 30; ++i) steps.step();
  const std::size_t divided = steps.early;
  steps.idle_in_backward = 1;
  steps.in_forward = 1;
  for (int i = 0; i < 6; ++i) steps.step();
  CHECK(steps.early > divided);
}

TEST_CASE("a change that does not help is taken back") {
  // The disk is idle in forward whatever runs there, for example before the first page can be known.
  Steps steps{.on_disk = 4, .forward = 1, .backward = 2, .in_forward = 1, .idle_in_forward = 0.5};
  std::size_t changes = 0;
  for (int i = 0; i < 36; ++i) {
    const std::size_t before = steps.early;
    steps.step();
    changes += i > 0 && steps.early != before;
  }
  CHECK(steps.early == 50);
  CHECK(changes <= 2);
}

TEST_CASE("updates stay in backward if forward waits for its own pages and nothing is left to take") {
  Steps steps{.on_disk = 1, .forward = 1, .backward = 2, .in_forward = 2};
  for (int i = 0; i < 60; ++i) {
    steps.step();
    CHECK(steps.early == 50);
  }
}

TEST_CASE("updates that are a small part of the disk's work move to the pass that has time") {
  Steps steps{.on_disk = 1, .forward = 3, .backward = 2, .in_backward = 4};
  for (int i = 0; i < 60; ++i) steps.step();
  const double before = steps.now;
  for (int i = 0; i < 30; ++i) steps.step();
  CHECK((steps.now - before) / 30 < 7.35);  // all in backward: 8; the best: 7
}
