// Bytes on their way between frames and home. A page's state changes when a transfer starts and when its result has
// been checked; a transfer that ends books its outcome itself and lets the next ones start. What should be read or
// written is decided above.
//
// Contract: under the cache's lock, which is given up where a home blocks and while a thread waits. A frame with a
// transfer stays. The error of a read is the frame's `failure`, for the thread that waits for it; that of a write is
// kept until a thread is told: throw_failed_write.
#pragma once

#include <functional>

#include "zeropage/pager/pace.h"
#include "zeropage/pager/runs.h"

namespace zeropage {

/// While it lives, this thread takes what a checkpoint is to hold: it must not wait for the room of that one.
struct TakesCheckpoint {
  TakesCheckpoint();
  ~TakesCheckpoint();
  TakesCheckpoint(const TakesCheckpoint&) = delete;
  TakesCheckpoint& operator=(const TakesCheckpoint&) = delete;
};

class Transfers {
 public:
  using Lock = Monitor::Lock;

  /// `home` is null if no run has one. `go_on` is called on the thread on which a transfer ended, after its outcome
  /// was booked, under the lock, which it may give up.
  Transfers(Monitor& monitor, FrameMemory& memory, Frames& frames, Runs& runs, Home* home,
            std::function<void(Lock&)> go_on)
      : monitor_(monitor), memory_(memory), frames_(frames), runs_(runs), home_(home), go_on_(std::move(go_on)) {}

  /// Starts bringing the frame's pages that are evicted and have no other frame. The caller holds a pin on it. If one
  /// cannot start, the frame has failed, and the thread that waits for it throws the error.
  void start_reads(Lock& lock, Frame& frame, Priority priority);
  /// Starts writing home what of the frame is newer there. False if that would block; nothing has started then, or
  /// all that could.
  bool write_back(Lock& lock, Frame& frame, Priority priority);

  /// Of a page that is about to be written: waits until no checkpoint needs what its frame holds, and sees to it that
  /// there is room for it at home. Throws DiskError; the page is then what it was.
  void make_writable(Lock& lock, Run& run, std::size_t page);
  /// The same without waiting; false if that is needed.
  bool try_make_writable(Run& run, std::size_t page);
  /// Sees to it that what is written of a run on disk has room there. False if a checkpoint must be done first.
  /// Throws DiskError.
  bool try_make_room_at_home(Run& run);
  /// Room for a new run on disk. Waits for checkpoints that are being written if the disk is full. Throws DiskError.
  std::shared_ptr<Backing> allocate(Lock& lock, std::size_t bytes);
  /// A checkpoint that is being written needs a run's content from now on, or not any more.
  void count_frozen(bool begins) { begins ? ++frozen_ : (--frozen_, ++thawed_); }

  /// Returns when `ready` says so. Throws AccessError if the cache is closed meanwhile.
  template <class Ready>
  void wait_until(Lock& lock, Ready ready, Cause cause = Cause::other);
  /// Returns when nothing is being read into the frame, which may be gone then unless the caller has a pin on it.
  void wait_for_reads(Lock& lock, Frame& frame);

  std::size_t reading_bytes() const { return reading_bytes_; }
  std::size_t writing_bytes() const { return writing_bytes_; }
  /// Of the home, lately, in bytes a second; 0 where that is not known.
  double read_rate() const { return pace_.read_rate(); }
  /// Whether a demanded transfer may give the lock up, and whether a read can start without.
  bool blocks() const { return home_->blocks(); }
  bool ready_to_read(const Run& run, std::size_t page) const { return home_->ready_to_read(run, page); }

  /// So far.
  std::size_t failed_writes() const { return failed_writes_; }
  /// Whether a write failed a moment ago, of which no thread has been told, and whose page has not been written
  /// since. What runs in the background rests then.
  bool has_failed_write() const;
  /// Throws the error of a write that failed, if no thread has been told and its page has not been written since; or
  /// only if one failed since there were `before` of them.
  void throw_failed_write();
  void throw_failed_write(std::size_t before);

  /// Of transfers made elsewhere, between a device's homes and the host.
  void count(std::size_t read, std::size_t written) { read_bytes_ += read, written_bytes_ += written; }
  std::size_t read_bytes() const { return read_bytes_; }
  std::size_t written_bytes() const { return written_bytes_; }

 private:
  void make_room_at_home(Lock& lock, Run& run);
  void wait_for_a_checkpoint(Lock& lock);
  bool has_room_at_home(Run& run);
  void wait_for_room(Lock& lock, Frame& frame);
  void place_for_write(Run& run, std::size_t page);
  void read_ended(Run& run, Frame& frame, std::size_t page, Home::Outcome outcome);
  void write_ended(Run& run, std::size_t page, const Home::Outcome& outcome);
  void transfer_ended(Run& run);
  void on_end(std::function<void()> book);
  void trace(bool begins, bool reads, const Run& run, std::size_t page) const noexcept;

  Monitor& monitor_;
  FrameMemory& memory_;
  Frames& frames_;
  Runs& runs_;
  Home* const home_;
  const std::function<void(Lock&)> go_on_;
  std::size_t reading_bytes_ = 0, writing_bytes_ = 0;
  Pace pace_;
  std::exception_ptr failed_write_;  // that no thread has been told of
  Clock::time_point failed_at_;
  std::size_t failed_writes_ = 0;
  std::size_t frozen_ = 0, thawed_ = 0;             // runs that checkpoints need; that they needed once
  std::size_t read_bytes_ = 0, written_bytes_ = 0;  // so far
};

template <class Ready>
void Transfers::wait_until(Lock& lock, Ready ready, Cause cause) {
  if (ready()) return;
  const Waiting waiting(monitor_, cause);
  const Inside inside(monitor_);
  while (!ready()) {
    monitor_.check_usable();
    bool ended = false;
    if (memory_.device()) {
      const Unlocked unlocked(lock);
      ended = home_->tidy(/*wait=*/true);
    }
    if (!ended && !ready()) monitor_.sleep(lock);
    monitor_.check_usable();
  }
}

}  // namespace zeropage
