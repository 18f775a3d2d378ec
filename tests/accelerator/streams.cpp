#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include "device.h"

namespace sim {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kStreams = 33;  // the default one, and the pool

std::atomic<std::int64_t> delay_microseconds = 0;
std::atomic<double> link_bytes_per_second = 0;
std::atomic<bool> forked = false;

std::array<Queue*, kStreams>& queues() {
  static auto* const all = [] {
    auto* const made = new std::array<Queue*, kStreams>;  // for ever: threads may outlive main()
    for (int i = 0; i < kStreams; ++i) (*made)[i] = new Queue(i);
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return made;
  }();
  return *all;
}

thread_local c10::StreamId current = 0;
thread_local Queue* working = nullptr;  // on its own thread

struct Failure {
  std::mutex mutex;
  std::string what;
};
Failure& failure() {
  static auto* const made = new Failure;
  return *made;
}

}  // namespace

std::uint64_t Queue::push(std::function<void()> work) {
  TORCH_CHECK(!forked, "sim: cannot use the device in a forked child");
  std::lock_guard lock(mutex_);
  items_.push_back(std::move(work));
  if (!started_) {
    started_ = true;
    std::thread([this] { this->work(); }).detach();
  }
  changed_.notify_all();
  return ++asked_;
}

std::uint64_t Queue::asked() {
  std::lock_guard lock(mutex_);
  return asked_;
}

void Queue::wait(std::uint64_t position) {
  if (done(position)) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ran_ >= position; });
}

void Queue::finish() {
  wait(asked());
  throw_failure();
}

void Queue::seed(std::uint64_t seed) {
  std::lock_guard lock(mutex_);
  random_.seed(seed * kStreams + static_cast<std::uint64_t>(id_));
}

void Queue::work() {
  working = this;
  at::set_num_threads(1);                      // the device's own: the host's cores are not waited for at barriers
  at::AutoDispatchBelowADInplaceOrView below;  // shadows may have been made in inference mode
  while (true) {
    std::function<void()> item;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !items_.empty(); });
      item = std::move(items_.front());
      items_.pop_front();
    }
    delay();
    try {
      item();
    } catch (const std::exception& error) {
      note_failure(error.what());
    }
    item = nullptr;
    std::lock_guard lock(mutex_);
    ++ran_;
    changed_.notify_all();
  }
}

/// Sometimes not at all and sometimes for long, so that streams overtake each other in every way.
void Queue::delay() {
  const std::int64_t most = delay_microseconds;
  if (most == 0) return;
  std::uint64_t drawn;
  {
    std::lock_guard lock(mutex_);
    drawn = random_();
  }
  if (drawn % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds((drawn >> 8) % (most + 1)));
}

bool is_forked() { return forked; }

Queue& queue_of(const c10::Stream& stream) { return *queues().at(stream.id()); }
c10::Stream current_stream() { return c10::Stream(c10::Stream::UNSAFE, kDevice, current); }
c10::Stream set_current_stream(const c10::Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, std::exchange(current, stream.id()));
}
c10::Stream stream_from_pool() {
  static std::atomic<unsigned> next = 0;
  return c10::Stream(c10::Stream::UNSAFE, kDevice, 1 + next++ % (kStreams - 1));
}

void wait_for_all() noexcept {
  for (Queue* queue : queues()) queue->wait(queue->asked());
}

std::vector<Event> all_under_way() {
  std::vector<Event> events;
  for (Queue* queue : queues()) {
    if (const std::uint64_t asked = queue->asked(); !queue->done(asked)) events.push_back({queue, asked});
  }
  return events;
}

void synchronize() {
  wait_for_all();
  throw_failure();
}

void note_failure(const std::string& what) {
  std::lock_guard lock(failure().mutex);
  if (failure().what.empty()) failure().what = what;
}

void throw_failure() {
  std::lock_guard lock(failure().mutex);
  if (!failure().what.empty()) TORCH_CHECK(false, "sim: on the device: ", std::exchange(failure().what, {}));
}

bool Waits::note(c10::StreamId waiting, c10::StreamId awaited) {
  std::lock_guard lock(mutex_);
  ++counts_[{waiting, awaited}];
  return left_out_ != Pair{waiting, awaited};
}
void Waits::leave_out(c10::StreamId waiting, c10::StreamId awaited) {
  std::lock_guard lock(mutex_);
  left_out_ = {waiting, awaited};
}
void Waits::leave_none_out() {
  std::lock_guard lock(mutex_);
  left_out_.reset();
  counts_.clear();
}
std::vector<std::int64_t> Waits::counts() {
  std::lock_guard lock(mutex_);
  std::vector<std::int64_t> flat;
  for (const auto& [pair, count] : counts_) flat.insert(flat.end(), {pair.first, pair.second, count});
  return flat;
}
Waits& waits() {
  static auto* const made = new Waits;
  return *made;
}

void set_delays(std::uint64_t seed, std::int64_t microseconds) {
  for (Queue* queue : queues()) queue->seed(seed);
  delay_microseconds = microseconds;
}

void set_link(double bytes_per_second) { link_bytes_per_second = bytes_per_second; }

void cross_link(Way way, std::size_t bytes) {
  (way == Way::upload ? statistics().uploaded_bytes : statistics().downloaded_bytes) += bytes;
  if (working && working->id() != 0) working->crosses_link = true;
  const double speed = link_bytes_per_second;
  if (speed == 0) return;
  static auto* const links = new std::array<std::pair<std::mutex, Clock::time_point>, 2>;
  auto& [mutex, free_at] = (*links)[static_cast<int>(way)];
  Clock::time_point end;
  {
    std::lock_guard lock(mutex);
    const auto taken = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bytes / speed));
    free_at = end = std::max(free_at, Clock::now()) + taken;
    statistics().link_seconds += bytes / speed;
  }
  std::this_thread::sleep_until(end);
}

Statistics& statistics() {
  static auto* const made = new Statistics{};
  return *made;
}

}  // namespace sim
