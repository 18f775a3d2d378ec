#include "zeropage/comm/link_meter.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>

using namespace zeropage;
using namespace std::chrono_literals;

namespace {

constexpr double kRate = 100e6;  // of a link in virtual time, bytes a second

/// A link that sends one transfer after another, and a program that waits for them.
struct Link {
  LinkMeter meter;
  LinkMeter::Time::time_point now{1s}, free{1s};

  struct Sent {
    LinkMeter::Transfer transfer;
    LinkMeter::Time::time_point arrival;
  };
  static LinkMeter::Time::duration seconds(double s) {
    return std::chrono::duration_cast<LinkMeter::Time::duration>(std::chrono::duration<double>(s));
  }
  Sent send(std::size_t bytes) {
    free = std::max(free, now) + seconds(static_cast<double>(bytes) / kRate);
    return {meter.begin(bytes, now), free};
  }
  void compute(double s) { now += seconds(s); }
  void wait(const Sent& sent) {
    const auto waited = std::max(sent.arrival - now, LinkMeter::Time::duration(0));
    now += waited;
    meter.end(sent.transfer, waited, now);
  }
};

}  // namespace

TEST_CASE("a link's busy seconds are its bytes at its rate, whatever part of them a program waits for") {
  for (const double compute : {0.0, 0.03, 0.06, 0.09}) {  // before each wait; a transfer takes 0.1 s
    CAPTURE(compute);
    Link link;
    auto ahead = link.send(10'000'000);
    for (int i = 0; i < 20; ++i) {
      const auto next = link.send(10'000'000);
      link.compute(compute);
      link.wait(ahead);
      ahead = next;
    }
    const auto totals = link.meter.totals();
    CHECK(totals.busy_seconds == doctest::Approx(2.0).epsilon(0.01));
    CHECK(1 - totals.waited_seconds / totals.busy_seconds == doctest::Approx(compute / 0.1).epsilon(0.06));
  }
}

TEST_CASE("a rank that is late now and then does not make a link look slow") {
  Link link;
  for (int i = 0; i < 40; ++i) {
    auto sent = link.send(1'000'000);
    if (i % 3 == 2) sent.arrival += Link::seconds(0.1);
    link.wait(sent);
  }
  CHECK(link.meter.totals().busy_seconds == doctest::Approx(0.4).epsilon(0.05));
}

TEST_CASE("without a wait no rate is known") {
  Link link;
  const auto sent = link.send(1'000'000);
  link.compute(1);
  link.wait(sent);
  CHECK(link.meter.totals().busy_seconds == 0);
  CHECK(link.meter.totals().waited_seconds == 0);
}
