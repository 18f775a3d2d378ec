#include "zeropage/base/booked_time.h"

#include <doctest/doctest.h>

#include <mutex>
#include <optional>
#include <thread>

namespace zeropage {
namespace {

/// Virtual time, so that sums are exact.
struct Times {
  VirtualClock clock;
  VirtualClock::Entered entered{clock};
  BookedTime book;

  void pass(double seconds) { clock.advance(seconds); }
  double in(Spent spent) const { return book.seconds()[static_cast<int>(spent)]; }
  double sum() const {
    double sum = 0;
    for (const double seconds : book.seconds()) sum += seconds;
    return sum;
  }
};

TEST_CASE_FIXTURE(Times, "a booking inside another suspends it, and each second is booked once") {
  {
    const Booking overhead(&book, Spent::overhead);
    pass(1);
    {
      const Booking kernel(Spent::operators);
      pass(2);
      const Booking wait(Spent::disk);
      pass(4);
    }
    pass(8);
  }
  pass(16);
  CHECK(in(Spent::overhead) == doctest::Approx(9));
  CHECK(in(Spent::operators) == doctest::Approx(2));
  CHECK(in(Spent::disk) == doctest::Approx(4));
  CHECK(sum() == doctest::Approx(15));
}

TEST_CASE_FIXTURE(Times, "a cause absorbs the work that belongs to it") {
  const auto inside = [&](Spent outer, Spent inner) {
    const Booking around(&book, outer);
    const Booking within{inner};
    pass(1);
  };
  inside(Spent::updates, Spent::operators);
  CHECK(in(Spent::updates) == doctest::Approx(1));
  inside(Spent::upload, Spent::device);
  CHECK(in(Spent::upload) == doctest::Approx(1));
  inside(Spent::checkpoint, Spent::disk);
  CHECK(in(Spent::checkpoint) == doctest::Approx(1));
  inside(Spent::updates, Spent::disk);
  CHECK(in(Spent::disk) == doctest::Approx(1));
  CHECK(sum() == doctest::Approx(4));
}

TEST_CASE_FIXTURE(Times, "without a book, and on a thread that is none of the program's, nothing is booked") {
  {
    const Booking nowhere(Spent::disk);
    pass(1);
  }
  {
    const Unbooked other;
    const Booking booking(&book, Spent::disk);
    pass(1);
  }
  CHECK(sum() == 0);
}

TEST_CASE("a thread that waits for a booked mutex waits for other threads") {
  BookedTime book;
  BookedMutex<std::mutex> mutex;
  std::optional<std::lock_guard<BookedMutex<std::mutex>>> held(std::in_place, mutex);
  std::thread waits([&] {
    const Booking booking(&book, Spent::overhead);
    const std::lock_guard lock(mutex);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  held.reset();
  waits.join();
  CHECK(book.seconds()[static_cast<int>(Spent::threads)] > 0.01);
}

}  // namespace
}  // namespace zeropage
