// A cache's view of the cache above it, whose transfers pin pages here. The upper cache is a device's, above the
// host's ([Note: two memories] in frame_cache.h), or that of gathered tensors, above a rank's own. Only a device's is
// called.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

#include "zeropage/base/clock.h"
#include "zeropage/base/mutex.h"

namespace zeropage {

class UpperCache {
 public:
  /// Records that there is an upper cache.
  void serve() { serves_ = true; }
  bool serves() const { return serves_; }

  /// Lets this cache call the upper one, with no lock held. `progress`: a page has arrived here, so the upper one may
  /// read ahead. `tidy`: ends transfers that finished without a signal, waiting for the oldest; true if one ended.
  void connect(std::function<void()> progress, std::function<bool()> tidy) {
    progress_ = std::move(progress);
    tidy_ = std::move(tidy);
    connected_ = true;
  }
  /// Returns when no call is in progress.
  void disconnect() {
    const std::lock_guard lock(mutex_);
    connected_ = false;
  }
  bool connected() const { return connected_; }

  void progress() {
    std::unique_lock lock(mutex_, std::defer_lock);
    // In virtual time, transfers end on the thread that calls tidy().
    if (VirtualClock* const planned = VirtualClock::current(); !planned) {
      lock.lock();
    } else if (!lock.try_lock()) {
      return planned->postpone([this] { progress(); });
    }
    if (connected_) progress_();
  }
  bool tidy() {
    const std::lock_guard lock(mutex_);
    return connected_ && tidy_();
  }

 private:
  bool serves_ = false;
  Mutex mutex_;  // never taken under a cache's lock
  std::atomic<bool> connected_ = false;
  std::function<void()> progress_;
  std::function<bool()> tidy_;
};

}  // namespace zeropage
