// How a thread waits inside a cache: asleep, with the lock given up, and counted. Private to pager/.
#pragma once

#include <chrono>

#include "zeropage/pager/frame_cache.h"

namespace zeropage {

/// Adds the seconds of its life to a sum, under the cache's lock at both ends.
class Waiting {
 public:
  explicit Waiting(double& seconds) : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
  ~Waiting() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
};

/// Gives the lock up while it lives, whatever is thrown meanwhile.
class FrameCache::Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

/// A thread that gives the lock up and comes back: close() leaves it what it uses. Under the lock at both ends.
class FrameCache::Inside {
 public:
  explicit Inside(FrameCache& cache) : cache_(cache) { ++cache_.inside_; }
  ~Inside() {
    --cache_.inside_;
    if (cache_.closed_) cache_.finish_close();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  FrameCache& cache_;
};

/// Returns when `ready` says so. Throws AccessError if the cache is closed meanwhile.
template <class Ready>
void FrameCache::wait_until(Lock& lock, Ready ready) {
  if (ready()) return;
  const Waiting waiting(stats_.waited_seconds);
  const Inside inside(*this);
  while (!ready()) {
    check_usable();
    bool ended = false;
    if (has_separate_memory()) {
      const Unlocked unlocked(lock);
      ended = home_->tidy(/*wait=*/true);
    }
    if (!ended && !ready()) changed_.wait(lock);
    check_usable();
  }
}

}  // namespace zeropage
