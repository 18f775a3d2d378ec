#include "zeropage/comm/watchdog.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "zeropage/base/process.h"

namespace zeropage {
namespace {

using Time = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstLook{25}, kMostBetweenLooks{400};
constexpr milliseconds kSleepsAfter{1000};  // without a wait
constexpr milliseconds kCircleAfter{1000};  // the same post for so long
constexpr std::size_t kChannels = 3;

thread_local int goes_on = 0;

}  // namespace

struct Watchdog::State : std::enable_shared_from_this<State> {
  struct Post {
    int rank = -1;
    Watchdog::Channel channel = Watchdog::Channel::gathers;
    std::uint64_t number = 0;   // of the collective that the rank waits in
    bool goes_on = false;       // after an answer
    std::uint64_t gathers = 0;  // started by the rank
    bool operator==(const Post&) const = default;

    std::string text() const {
      std::ostringstream out;
      out << rank << ' ' << static_cast<int>(channel) << ' ' << number << ' ' << goes_on << ' ' << gathers;
      return out.str();
    }
    static std::optional<Post> parse(const std::string& text) {
      Post post;
      int channel = 0;
      std::istringstream in(text);
      if (!(in >> post.rank >> channel >> post.number >> post.goes_on >> post.gathers)) return std::nullopt;
      if (channel < 0 || static_cast<std::size_t>(channel) >= kChannels) return std::nullopt;
      post.channel = static_cast<Watchdog::Channel>(channel);
      return post;
    }
  };

  struct Wait {
    std::uint64_t id;
    Watchdog::Channel channel;
    std::uint64_t number;
    bool goes_on;
    Time::time_point next_look;
    milliseconds between = kFirstLook;
    struct Seen {
      Post post;
      Time::time_point since;
    };
    std::map<int, Seen> seen = {};  // by rank, posts that no answer helps
  };

  State(int rank, std::unique_ptr<Board> board, GiveUp give_up)
      : rank(rank), board(std::move(board)), give_up(std::move(give_up)) {}

  std::uint64_t begun_of(Channel channel) const { return begun[static_cast<std::size_t>(channel)]; }

  std::uint64_t add(Channel channel, std::uint64_t number) {
    std::lock_guard lock(mutex);
    const std::uint64_t id = ++ids;
    waits.push_back({id, channel, number, goes_on > 0, Time::now() + kFirstLook});
    if (!is_started) {
      is_started = start([state = shared_from_this()] { state->watch(); });
    } else if (is_asleep) {
      is_asleep = false;
      changed.notify_all();
    }
    return id;
  }

  /// False if the system has no room for a thread. Without it, a wait may last until the group's timeout.
  template <class Run>
  static bool start(Run&& run) {
    try {
      std::thread(std::forward<Run>(run)).detach();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  void remove(std::uint64_t id) {
    std::lock_guard lock(mutex);
    std::erase_if(waits, [&](const Wait& wait) { return wait.id == id; });
  }

  Wait* find(std::uint64_t id) {
    const auto wait = std::ranges::find(waits, id, &Wait::id);
    return wait == waits.end() ? nullptr : &*wait;
  }

  void watch() {
    std::unique_lock lock(mutex);
    auto last_wait = Time::now();
    while (!is_over) {
      const auto now = Time::now();
      if (!waits.empty()) last_wait = now;
      const auto due = std::ranges::find_if(waits, [&](const Wait& wait) { return wait.next_look <= now; });
      if (due == waits.end()) {
        if (now - last_wait < kSleepsAfter) {
          changed.wait_for(lock, kFirstLook);
        } else {
          is_asleep = true;
          changed.wait(lock, [&] { return is_over || !is_asleep; });
        }
        continue;
      }
      // Ranks that post or look in step would miss each other's posts.
      due->next_look = now + due->between * std::uniform_int_distribution(75, 125)(random) / 100;
      due->between = std::min(2 * due->between, kMostBetweenLooks);
      const Wait wait = *due;
      lock.unlock();
      try {  // the store may be gone, or may not answer for long
        wait.channel == Channel::gathers ? look(wait) : post(wait);
      } catch (const std::exception&) {
      }
      lock.lock();
    }
  }

  void post(const Wait& wait) const {
    board->post(Post{rank, wait.channel, wait.number, wait.goes_on, begun_of(Channel::gathers)}.text());
  }

  void look(const Wait& wait) {
    const auto text = board->read();
    const auto post = text ? Post::parse(*text) : std::nullopt;
    if (!post || post->rank == rank || post->gathers >= wait.number) return;
    if (begun_of(post->channel) >= post->number) return;
    std::lock_guard lock(mutex);
    Wait* const still = find(wait.id);
    if (!still || is_over) return;
    if (post->goes_on) {
      still->between = kFirstLook;
      if (!is_answering && answer) {
        is_answering = start([state = shared_from_this(), post = *post] { state->run_answer(post); });
      }
      return;
    }
    const auto now = Time::now();
    auto& seen = still->seen.try_emplace(post->rank, Wait::Seen{*post, now}).first->second;
    if (seen.post != *post) seen = {*post, now};
    if (now - seen.since >= kCircleAfter) give_up("");
  }

  void run_answer(const Post& post) {
    const GoesOn goes_on;
    std::optional<std::string> failure;
    Answer run;
    {
      std::lock_guard lock(mutex);
      run = answer, answering = std::this_thread::get_id();
    }
    try {
      if (run) run([&] { return is_over.load() || begun_of(post.channel) >= post.number; });
    } catch (const std::exception& error) {
      failure = error.what();
    }
    run = nullptr;  // may hold the last reference to what destroys the watchdog
    std::lock_guard lock(mutex);
    if (failure && !is_over) give_up(*failure);
    is_answering = false, answering = {};
    changed.notify_all();
  }

  const int rank;
  const std::unique_ptr<Board> board;
  const GiveUp give_up;  // called under the mutex, while its owner lives
  std::array<std::atomic<std::uint64_t>, kChannels> begun{};
  std::mutex mutex;
  std::condition_variable changed;
  Answer answer;
  std::vector<Wait> waits;
  std::uint64_t ids = 0;
  std::minstd_rand random{std::random_device{}()};  // of the watching thread
  std::thread::id answering;
  bool is_started = false, is_asleep = false, is_answering = false;
  std::atomic<bool> is_over = false;
  const std::uint64_t generation = process_generation();
};

Watchdog::Watchdog(int rank, std::unique_ptr<Board> board, GiveUp give_up)
    : state_(std::make_shared<State>(rank, std::move(board), std::move(give_up))) {}

Watchdog::~Watchdog() {
  if (state_->generation != process_generation()) return;  // a forked child has no such threads
  std::unique_lock lock(state_->mutex);
  state_->is_over = true;
  state_->changed.notify_all();
  state_->answer = nullptr;
  const bool is_itself = state_->answering == std::this_thread::get_id();
  if (!is_itself) state_->changed.wait(lock, [&] { return !state_->is_answering; });
}

void Watchdog::answer_with(Answer answer) {
  std::lock_guard lock(state_->mutex);
  state_->answer = std::move(answer);
}

std::uint64_t Watchdog::begin(Channel channel) { return ++state_->begun[static_cast<std::size_t>(channel)]; }

Watchdog::Waiting::Waiting(Watchdog* watchdog, Channel channel, std::uint64_t number) : watchdog_(watchdog) {
  if (watchdog_) id_ = watchdog_->state_->add(channel, number);
}

Watchdog::Waiting::~Waiting() {
  if (watchdog_) watchdog_->state_->remove(id_);
}

Watchdog::GoesOn::GoesOn() { ++goes_on; }
Watchdog::GoesOn::~GoesOn() { --goes_on; }

}  // namespace zeropage
