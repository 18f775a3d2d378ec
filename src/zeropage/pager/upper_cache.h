// What a cache knows of another one above it, whose transfers pin pages here: that of a device, above the host's
// ([Note: two memories] in frame_cache.h), or that of gathered tensors, above a rank's own. Only the first is called.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

#include "zeropage/base/clock.h"

namespace zeropage {

class UpperCache {
 public:
  /// There is one.
  void serve() { serves_ = true; }
  bool serves() const { return serves_; }

  /// It is called from now on, with no lock held: `progress` where something has come here, which it may read ahead;
  /// `tidy` to end transfers that have come to their end without a word, waiting for the oldest. True if one ended.
  void connect(std::function<void()> progress, std::function<bool()> tidy) {
    progress_ = std::move(progress);
    tidy_ = std::move(tidy);
    connected_ = true;
  }
  /// Returns when no call is under way.
  void disconnect() {
    const std::lock_guard lock(mutex_);
    connected_ = false;
  }
  bool connected() const { return connected_; }

  void progress() {
    std::unique_lock lock(mutex_, std::defer_lock);
    // In virtual time the thread that tidies is the one on which transfers end.
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
  std::mutex mutex_;  // never taken under a cache's lock
  std::atomic<bool> connected_ = false;
  std::function<void()> progress_;
  std::function<bool()> tidy_;
};

}  // namespace zeropage
