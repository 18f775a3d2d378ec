#include "zeropage/rules/update_balance.h"

#include <doctest/doctest.h>

#include <algorithm>

using namespace zeropage;

namespace {

/// A program with parameters of equal size, whose update takes as long on the disk as `on_disk` says. A phase takes
/// the longer of its computing and its disk time.
struct Steps {
  double on_disk, forward, backward;
  UpdateBalance balance = {};
  double now = 0, waited = 0;
  int early = 0;

  void step() {
    constexpr int kParameters = 50;
    early = 0;
    run(forward, on_disk * (1 - before));
    for (int i = 0; i < kParameters; ++i) early += balance.takes(1000, true, {now, waited});
    before = static_cast<double>(early) / kParameters;
    run(backward, on_disk * before);
    balance.step({now, waited});
    balance.step({now, waited});  // another optimizer's
  }
  void run(double computes, double moves) {
    now += std::max(computes, moves);
    waited += std::max(moves - computes, 0.0);
  }
  double seconds_of_a_step() {
    const double start = now;
    step();
    return now - start;
  }
  double before = 1;  // the share that the latest backward updated
};

}  // namespace

TEST_CASE("updates that backward hides stay there") {
  Steps steps{.on_disk = 1, .forward = 1, .backward = 2};
  for (int i = 0; i < 20; ++i) steps.step();
  CHECK(steps.early == 50);
}

TEST_CASE("updates are divided so that forward and backward wait equally long") {
  for (const double on_disk : {2.5, 4.0, 8.0}) {
    Steps steps{.on_disk = on_disk, .forward = 1, .backward = 2};
    for (int i = 0; i < 30; ++i) steps.step();
    // The shorter of them would wait for as many bytes as the other, less what it computes longer.
    const double least = std::max(3.0, on_disk);
    CHECK(steps.seconds_of_a_step() < 1.04 * least);
    const int divided = steps.early;
    for (int i = 0; i < 30; ++i) {
      steps.step();
      CHECK(steps.early == divided);  // each change would be a surprise to the plan
    }
  }
}

TEST_CASE("they come back to backward when it has time again") {
  Steps steps{.on_disk = 6, .forward = 1, .backward = 2};
  for (int i = 0; i < 30; ++i) steps.step();
  CHECK(steps.early < 45);
  steps.on_disk = 1.5;
  steps.forward = 0.1;
  for (int i = 0; i < 60; ++i) steps.step();
  CHECK(steps.seconds_of_a_step() < 1.04 * 2.1);
}
