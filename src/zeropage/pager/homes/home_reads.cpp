#include "zeropage/pager/homes/home_reads.h"

#include <cstring>
#include <mutex>
#include <utility>

#include "zeropage/base/mutex.h"
#include "zeropage/pager/cache/gate.h"

namespace zeropage {

struct HomeRead::State {
  Monitor* monitor;
  const Run* run = nullptr;  // null: the content read cannot change
  std::size_t page = 0;
  std::uint64_t changes = 0;
  bool is_unwritten = false;  // the page has no home content: it reads as zeros
  SlotRef slot;               // of content that may be replaced meanwhile
  Mutex mutex;
  Condition ended;
  bool done = false;
  std::exception_ptr error;

  void end(Home::Outcome outcome) {
    std::lock_guard lock(mutex);
    done = true;
    error = std::move(outcome.error);
    ended.notify_all();
  }
  const std::uint64_t process = process_generation();
  void wait() {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return done; });
  }
  void let_go() {
    if (!slot) return;
    const Monitor::Lock lock(monitor->mutex());  // guards the slot's count
    slot = nullptr;
  }
};

HomeRead& HomeRead::operator=(HomeRead&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

HomeRead::~HomeRead() {
  if (!state_) return;
  if (state_->process != process_generation()) {
    new auto(std::move(state_));  // in a forked child: the read is the parent's, and never ends here
  } else {
    state_->wait();
    state_->let_go();
  }
}

bool HomeRead::wait() {
  const auto state = std::exchange(state_, nullptr);
  state->wait();
  state->let_go();
  if (state->error) std::rethrow_exception(state->error);
  if (!state->run) return true;
  Monitor::Lock lock(state->monitor->mutex());
  state->monitor->check_usable();
  if (state->run->changes != state->changes) return false;
  return state->is_unwritten || obstacle(*state->run, state->page, Intent::bypass) == Obstacle::none;
}

HomeRead HomeReads::start(const Segment& segment, std::size_t page, std::byte* into) {
  if (!home_) return {};
  monitor_.check_usable();
  Monitor::Lock lock(monitor_.mutex());
  monitor_.check_usable();
  const Run& run = *segment.run();
  if (obstacle(run, page, Intent::bypass) != Obstacle::none) return {};
  return watched(
      start(run.bytes_of(page),
            [&](Home::Done done) { return home_->read(run, page, into, Priority::ahead, std::move(done)); }),
      run, page);
}

HomeRead HomeReads::start_before_version(const Segment& segment, std::size_t page, std::size_t at, std::size_t bytes,
                                         std::byte* into) {
  if (!home_) return {};
  monitor_.check_usable();
  Monitor::Lock lock(monitor_.mutex());
  monitor_.check_usable();
  const Run& run = *segment.run();
  const SlotRef slot = run.has_version ? run.pages[page].home : nullptr;
  if (!slot || !slot->extent) return {};
  HomeRead read = start(bytes, [&](Home::Done done) {
    return home_->read_part(slot->extent, at, bytes, into, Priority::demanded, std::move(done));
  });
  read.state_->slot = slot;
  return read;
}

HomeRead HomeReads::start_part(const Segment& segment, std::size_t page, std::size_t at, std::size_t bytes,
                               std::byte* into) {
  if (!home_) return {};
  monitor_.check_usable();
  Monitor::Lock lock(monitor_.mutex());
  monitor_.check_usable();
  const Run& run = *segment.run();
  if (run.pages[page].state == Residency::zero && !run.pages[page].frame && run.is_on_disk && !run.slots) {
    HomeRead zeros = watched(start(0, [](const Home::Done&) { return Home::Outcome{}; }), run, page);
    zeros.state_->is_unwritten = true;
    lock.unlock();
    std::memset(into, 0, bytes);
    return zeros;
  }
  if (obstacle(run, page, Intent::bypass) != Obstacle::none || !run.slot_of(page).extent) return {};
  return watched(start(bytes,
                       [&](Home::Done done) {
                         const Extent& extent = run.slot_of(page).extent;
                         return home_->read_part(extent, at, bytes, into, Priority::demanded, std::move(done));
                       }),
                 run, page);
}

/// Remembers the content that is read, for HomeRead::wait(). Under the lock.
HomeRead HomeReads::watched(HomeRead read, const Run& run, std::size_t page) {
  read.state_->run = &run;
  read.state_->page = page;
  read.state_->changes = run.changes;
  return read;
}

HomeRead HomeReads::start_frozen(const Slot& slot, std::size_t bytes, std::byte* into) {
  return start(bytes, [&](Home::Done done) {
    return home_->read_slot(slot, bytes, into, Priority::background, std::move(done));
  });
}

HomeRead HomeReads::start(std::size_t bytes, const std::function<std::optional<Home::Outcome>(Home::Done)>& begin) {
  HomeRead read;
  read.state_ = std::make_shared<HomeRead::State>();
  const auto& state = read.state_;
  state->monitor = &monitor_;
  bytes_ += bytes;
  try {
    if (auto outcome = begin([state](Home::Outcome ended) { state->end(std::move(ended)); })) {
      state->end(std::move(*outcome));
    }
  } catch (...) {
    state->end({std::current_exception(), {}});
  }
  return read;
}

std::size_t HomeReads::bytes() const { return bytes_; }

}  // namespace zeropage
