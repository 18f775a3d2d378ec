// Transfers between frames and home. A page's state changes when a transfer starts, and again when its result has
// been checked. A transfer that ends books its outcome and lets the next ones start. The layers above decide what to
// read and write.
//
// Contract: under the cache's lock, which it gives up where a home blocks and while a thread waits. A frame with a
// transfer stays. A failed read sets the frame's `failure`, for the thread that waits for the frame. A failed write's
// error is kept until throw_failed_write() throws it to a thread.
#pragma once

#include <functional>

#include "zeropage/pager/cache/runs.h"
#include "zeropage/pager/foresight/pace.h"

namespace zeropage {

/// While it lives, this thread takes a snapshot for a checkpoint, so it must not wait for room which that checkpoint
/// holds.
struct TakesCheckpoint {
  TakesCheckpoint();
  ~TakesCheckpoint();
  TakesCheckpoint(const TakesCheckpoint&) = delete;
  TakesCheckpoint& operator=(const TakesCheckpoint&) = delete;
};

class Transfers {
 public:
  using Lock = Monitor::Lock;

  /// `home` is null if no run has one. After a transfer's outcome is booked, its thread calls `go_on` under the lock,
  /// which `go_on` may give up.
  Transfers(Monitor& monitor, FrameMemory& memory, Frames& frames, Runs& runs, Home* home,
            std::function<void(Lock&)> go_on)
      : monitor_(monitor), memory_(memory), frames_(frames), runs_(runs), home_(home), go_on_(std::move(go_on)) {}

  /// Starts to read the frame's pages that are evicted and have no other frame. The caller holds a pin on the frame.
  /// If a read cannot start, the frame has failed, and the thread that waits for it throws the error.
  void start_reads(Lock& lock, Frame& frame, Priority priority);
  /// Starts to write home the frame's pages that are newer there. Returns false if that would block; then it has
  /// started nothing, or all that it could. Pages that are being overwritten stay ([Note: overwriting]). Throws
  /// AccessError if the cache was closed meanwhile; the frame may be gone then.
  bool write_back(Lock& lock, Frame& frame, Priority priority);

  /// Prepares a page to be written: waits until no checkpoint needs its frame's content, and reserves a slot for its
  /// next write home. Throws DiskError; the page is then unchanged.
  void make_writable(Lock& lock, Run& run, std::size_t page);
  /// The same without waiting; false if it would have to wait.
  bool try_make_writable(Run& run, std::size_t page);
  /// Makes room for `bytes` more on the disk. If it is full, waits for a checkpoint in progress. Throws DiskError.
  /// Gives the lock up.
  void grow(Lock& lock, std::size_t bytes);
  /// Counts runs that a checkpoint in progress needs: one more, or one fewer.
  void count_frozen(bool begins) { begins ? ++frozen_ : (--frozen_, ++thawed_); }

  /// Returns when `ready` is true. Throws AccessError if the cache is closed meanwhile.
  template <class Ready>
  void wait_until(Lock& lock, Ready ready, Cause cause = Cause::other);
  /// Returns when no read into the frame is in flight. Unless the caller has a pin on the frame, it may be gone then.
  void wait_for_reads(Lock& lock, Frame& frame);
  /// After close(): returns when all transfers have ended that do so without a signal. Not under the lock.
  void finish() noexcept;
  /// Speeds up the writes of the run, for a thread that will wait for them. Gives the lock up; the run must stay.
  void hurry_writes(Lock& lock, const Run& run);

  std::size_t reading_bytes() const { return reading_bytes_; }
  std::size_t writing_bytes() const { return writing_bytes_; }
  /// The home's recent read rate in bytes a second; 0 if unknown.
  double read_rate() const { return pace_.read_rate(); }
  /// Seconds with a transfer in flight, so far.
  double busy_seconds() const { return pace_.busy_seconds(); }
  /// Whether a demanded transfer may give the lock up, and whether a read can start without doing so.
  bool blocks() const { return home_->blocks(); }
  bool ready_to_read(const Run& run, std::size_t page) const { return home_->ready_to_read(run, page); }

  /// The page's content is of no interest any more.
  void forget_failed_write(Page& page) { runs_.note_write(page, /*failed=*/false); }
  std::size_t failed_writes() const { return failed_writes_; }
  /// Whether a write failed less than a second ago, no thread got its error, and its page has not been written since.
  /// Background transfers then pause.
  bool has_failed_write() const;
  /// Throws the error of a failed write, unless a thread got it already or its page has been written since. With
  /// `before`: only if the count of failed writes is no longer `before`.
  void throw_failed_write();
  void throw_failed_write(std::size_t before);

  /// Counts transfers that others made between a device's homes and the host.
  void count(std::size_t read, std::size_t written) { read_bytes_ += read, written_bytes_ += written; }
  std::size_t read_bytes() const { return read_bytes_; }
  std::size_t written_bytes() const { return written_bytes_; }

 private:
  bool try_reserve_slot(Run& run, std::size_t page);
  void grow_for(Lock& lock, Frame& frame, std::size_t bytes);
  void wait_for_a_checkpoint(Lock& lock, std::exception_ptr full);
  void detach_missing(Frame& frame) noexcept;
  void read_ended(Run& run, Frame& frame, std::size_t page, Home::Outcome outcome);
  void write_ended(Run& run, std::size_t page, const Home::Outcome& outcome, bool has_failed = true);
  void transfer_ended(Run& run);
  template <class Book>
  void on_end(Book book);
  void trace(bool begins, bool reads, const Run& run, std::size_t page) const noexcept;

  Monitor& monitor_;
  FrameMemory& memory_;
  Frames& frames_;
  Runs& runs_;
  Home* const home_;
  const std::function<void(Lock&)> go_on_;
  std::size_t reading_bytes_ = 0, writing_bytes_ = 0;
  mutable Pace pace_;                // mutable: it counts until now
  std::exception_ptr failed_write_;  // its error is not yet thrown to any thread
  Clock::time_point failed_at_;
  std::size_t failed_writes_ = 0;
  std::size_t frozen_ = 0, thawed_ = 0;             // runs that checkpoints need now; count of runs they released
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
