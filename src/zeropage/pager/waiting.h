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

/// Returns when `ready` says so. Throws AccessError if the cache is closed meanwhile.
template <class Ready>
void FrameCache::wait_until(Lock& lock, Ready ready) {
  if (ready()) return;
  const Waiting waiting(stats_.waited_seconds);
  struct Counted {
    FrameCache& cache;
    explicit Counted(FrameCache& c) : cache(c) { ++cache.waiters_; }
    ~Counted() {
      --cache.waiters_;
      if (cache.closed_) cache.finish_close();
    }
  } counted(*this);
  while (!ready()) {
    bool ended = false;
    if (has_separate_memory()) {
      lock.unlock();
      ended = home_->tidy(/*wait=*/true);
      lock.lock();
    }
    if (!ended && !ready()) changed_.wait(lock);
    check_usable();
  }
}

}  // namespace zeropage
