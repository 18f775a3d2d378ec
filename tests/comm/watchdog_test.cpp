#include "zeropage/comm/watchdog.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

using namespace zeropage;
using namespace std::chrono_literals;
using Order = Watchdog::Channel;

namespace {

/// The board of ranks that are threads of one process.
struct Posts {
  std::mutex mutex;
  std::optional<std::string> text;
  std::atomic<int> count = 0, reads = 0;
};

class SharedBoard final : public Watchdog::Board {
 public:
  explicit SharedBoard(Posts& posts) : posts_(posts) {}
  void post(const std::string& text) override {
    std::lock_guard lock(posts_.mutex);
    posts_.text = text;
    ++posts_.count;
  }
  std::optional<std::string> read() override {
    std::lock_guard lock(posts_.mutex);
    ++posts_.reads;
    return posts_.text;
  }

 private:
  Posts& posts_;
};

/// A rank that counts its answers; an answer begins what it is asked for.
struct Watched {
  Watched(int rank, Posts& posts)
      : watchdog(rank, std::make_unique<SharedBoard>(posts), [this](const std::string&) { gave_up = true; }) {
    watchdog.answer_with([this](const auto& has_begun) {
      ++answers;
      while (!has_begun()) watchdog.begin(Order::words);
    });
  }
  std::uint64_t begin(Order channel, int times) {
    std::uint64_t last = 0;
    for (int i = 0; i < times; ++i) last = watchdog.begin(channel);
    return last;
  }

  std::atomic<int> answers = 0;
  std::atomic<bool> gave_up = false;
  Watchdog watchdog;
};

template <class Condition>
bool comes_true(Condition&& condition, std::chrono::milliseconds within = 5s) {
  const auto until = std::chrono::steady_clock::now() + within;
  while (!condition() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(5ms);
  return condition();
}

}  // namespace

TEST_CASE("a rank in a later gather answers one that waits for its words") {
  Posts posts;
  Watched ahead(0, posts), behind(1, posts);
  ahead.begin(Order::gathers, 3);
  behind.begin(Order::gathers, 2);
  const std::uint64_t words = behind.begin(Order::words, 4);
  const Watchdog::GoesOn goes_on;
  const Watchdog::Waiting for_words(&behind.watchdog, Order::words, words);
  const Watchdog::Waiting in_gather(&ahead.watchdog, Order::gathers, 3);
  CHECK(comes_true([&] { return ahead.answers == 1; }));
  std::this_thread::sleep_for(200ms);
  CHECK(ahead.answers == 1);  // what is begun needs no second answer
  CHECK(ahead.watchdog.begin(Order::words) == 5);
  CHECK(behind.answers == 0);
  CHECK_FALSE(ahead.gave_up);
}

TEST_CASE("ranks that run alike do not answer") {
  Posts posts;
  Watched ahead(0, posts), behind(1, posts);
  ahead.begin(Order::gathers, 3);
  behind.begin(Order::gathers, 3);  // its part is on its way
  const Watchdog::GoesOn goes_on;
  const Watchdog::Waiting for_words(&behind.watchdog, Order::words, behind.begin(Order::words, 1));
  const Watchdog::Waiting in_gather(&ahead.watchdog, Order::gathers, 3);
  CHECK(comes_true([&] { return posts.reads >= 3 && posts.count >= 2; }));
  CHECK(ahead.answers == 0);
}

TEST_CASE("a circle of waits ends soon, and a pause that looks like one does not") {
  Posts posts;
  Watched ahead(0, posts), behind(1, posts);
  ahead.begin(Order::gathers, 1);
  const std::uint64_t words = behind.begin(Order::words, 1);
  {
    const Watchdog::Waiting for_words(&behind.watchdog, Order::words, words);
    const Watchdog::Waiting in_gather(&ahead.watchdog, Order::gathers, 1);
    std::this_thread::sleep_for(300ms);
    CHECK_FALSE(ahead.gave_up);
  }
  const Watchdog::Waiting for_words(&behind.watchdog, Order::words, words);
  const Watchdog::Waiting in_gather(&ahead.watchdog, Order::gathers, 1);
  CHECK(comes_true([&] { return ahead.gave_up.load(); }));
  CHECK(ahead.answers == 0);
  CHECK_FALSE(behind.gave_up);
}

TEST_CASE("posts of several ranks do not hide a circle from each other") {
  Posts posts;
  Watched ahead(0, posts), behind(1, posts), other(2, posts);
  ahead.begin(Order::gathers, 1);
  const Watchdog::Waiting for_words(&behind.watchdog, Order::words, behind.begin(Order::words, 1));
  const Watchdog::Waiting also_for_words(&other.watchdog, Order::words, other.begin(Order::words, 1));
  const Watchdog::Waiting in_gather(&ahead.watchdog, Order::gathers, 1);
  CHECK(comes_true([&] { return ahead.gave_up.load(); }, 20s));
}

TEST_CASE("an answer that throws ends the waits of its rank") {
  Posts posts;
  Watched behind(1, posts);
  std::string said;
  std::mutex mutex;
  Watchdog ahead(0, std::make_unique<SharedBoard>(posts), [&](const std::string& why) {
    std::lock_guard lock(mutex);
    said = why;
  });
  ahead.answer_with([](const auto&) { throw std::runtime_error("no memory"); });
  ahead.begin(Order::gathers);
  const Watchdog::GoesOn goes_on;
  const Watchdog::Waiting for_words(&behind.watchdog, Order::words, behind.begin(Order::words, 1));
  const Watchdog::Waiting in_gather(&ahead, Order::gathers, 1);
  CHECK(comes_true([&] {
    std::lock_guard lock(mutex);
    return said == "no memory";
  }));
}

TEST_CASE("short waits post nothing, and a board that fails ends nothing") {
  class Failing final : public Watchdog::Board {
    void post(const std::string&) override { throw std::runtime_error("gone"); }
    std::optional<std::string> read() override { throw std::runtime_error("gone"); }
  };
  Posts posts;
  Watched rank(0, posts);
  for (int i = 0; i < 1000; ++i) {
    const Watchdog::Waiting waiting(&rank.watchdog, Order::words, rank.watchdog.begin(Order::words));
  }
  CHECK(posts.count == 0);
  std::this_thread::sleep_for(1200ms);  // it sleeps, and wakes for the next wait
  const Watchdog::Waiting waiting(&rank.watchdog, Order::words, 1001);
  CHECK(comes_true([&] { return posts.count > 0; }));

  std::atomic<bool> gave_up = false;
  Watchdog failing(1, std::make_unique<Failing>(), [&](const std::string&) { gave_up = true; });
  const Watchdog::Waiting for_words(&failing, Order::words, 1), in_gather(&failing, Order::gathers, 1);
  std::this_thread::sleep_for(200ms);
  CHECK_FALSE(gave_up);
}

TEST_CASE("a watchdog ends after its answer, which may throw") {
  Posts posts;
  Watched behind(1, posts);
  std::atomic<bool> is_over = false;
  std::string said;
  {
    Watchdog ahead(0, std::make_unique<SharedBoard>(posts), [&](const std::string& why) { said = why; });
    std::atomic<bool> began = false;
    ahead.answer_with([&](const auto&) {
      began = true;
      std::this_thread::sleep_for(100ms);
      is_over = true;
      throw std::runtime_error("the other rank died");
    });
    ahead.begin(Order::gathers);
    const Watchdog::GoesOn goes_on;
    const Watchdog::Waiting for_words(&behind.watchdog, Order::words, behind.begin(Order::words, 1));
    const Watchdog::Waiting in_gather(&ahead, Order::gathers, 1);
    CHECK(comes_true([&] { return began.load(); }));
  }
  CHECK(is_over);
  CHECK(said.empty());  // its owner is going away
}
