#include "zeropage/pager/home_reads.h"

#include <condition_variable>
#include <mutex>
#include <utility>

namespace zeropage {
namespace {

bool is_at_home_alone(const Run& run, std::size_t page) {
  return run.extent && !run.next_extent && !run.slots && run.pages[page].state == Residency::evicted &&
         run.pages[page].frame == nullptr;
}

}  // namespace

struct HomeRead::State {
  Monitor* monitor;
  const Run* run;
  std::size_t page;
  std::uint64_t changes;
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  std::exception_ptr error;

  void end(Home::Outcome outcome) {
    std::lock_guard lock(mutex);
    done = true;
    error = std::move(outcome.error);
    ended.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return done; });
  }
};

HomeRead& HomeRead::operator=(HomeRead&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

HomeRead::~HomeRead() {
  if (state_) state_->wait();
}

bool HomeRead::wait() {
  const auto state = std::exchange(state_, nullptr);
  state->wait();
  if (state->error) std::rethrow_exception(state->error);
  Monitor::Lock lock(state->monitor->mutex());
  state->monitor->check_usable();
  return is_at_home_alone(*state->run, state->page) && state->run->changes == state->changes;
}

HomeRead HomeReads::start(const Segment& segment, std::size_t page, std::byte* into) {
  HomeRead read;
  if (!home_) return read;
  monitor_.check_usable();
  Monitor::Lock lock(monitor_.mutex());
  monitor_.check_usable();
  const Run& run = *segment.run();
  if (!is_at_home_alone(run, page)) return read;
  read.state_ = std::make_shared<HomeRead::State>();
  const auto& state = read.state_;
  state->monitor = &monitor_;
  state->run = &run;
  state->page = page;
  state->changes = run.changes;
  bytes_ += run.bytes_of(page);
  try {
    const auto done = [state](Home::Outcome outcome) { state->end(std::move(outcome)); };
    if (auto outcome = home_->read(run, page, into, Priority::ahead, done)) state->end(std::move(*outcome));
  } catch (...) {
    state->end({std::current_exception(), {}});
  }
  return read;
}

std::size_t HomeReads::bytes() const { return bytes_; }

}  // namespace zeropage
