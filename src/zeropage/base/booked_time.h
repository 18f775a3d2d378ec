// Books the seconds of the program's threads to causes: each moment of a thread inside zeropage belongs to exactly
// one cause. It decides nothing and knows nothing of the work that it times.
//
// [Note: exclusive time] A thread has a stack of bookings. Only the innermost one runs: opening a booking suspends
// the outer one until it closes. Each switch reads the clock once. Time outside of all bookings belongs to the
// program: its own code, and operators of PyTorch that zeropage does not see.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "zeropage/base/clock.h"

namespace zeropage {

/// The causes. Waits come first.
enum class Spent : std::uint8_t {
  disk,        // A wait for content from disk, or for its way there.
  upload,      // A wait for content from the host.
  gather,      // A wait for content from other ranks.
  memory,      // A wait for other pages to leave memory.
  device,      // A wait for the device's own work, whose result the host needs.
  ranks,       // A wait for other ranks, in sums and checks.
  threads,     // A wait for other threads' pins and locks.
  checkpoint,  // Saving, loading, and waits for a checkpoint that another thread writes.
  updates,     // Deferred operators, which are mostly updates of parameters.
  copies,      // Copies of gradients and activations into pages.
  overhead,    // Bookkeeping of zeropage.
  operators,   // Kernels of PyTorch that zeropage calls. Reports count all other time as operators too.
};
inline constexpr int kSpent = static_cast<int>(Spent::operators) + 1;

inline constexpr bool is_wait(Spent spent) { return spent <= Spent::checkpoint; }
/// As traces and lists of waits name it.
std::string_view name_of(Spent spent);

/// Sums by cause. Any thread may add and read.
class BookedTime {
 public:
  using Seconds = std::array<double, kSpent>;

  /// The book for time that belongs to no space, such as that of a checkpoint of tensors of several.
  static BookedTime& of_no_space();

  void add(Spent spent, Clock::duration time) {
    sums_[static_cast<std::size_t>(spent)].fetch_add(time.count(), std::memory_order_relaxed);
  }
  Seconds seconds() const;

 private:
  std::array<std::atomic<Clock::rep>, kSpent> sums_ = {};
};

/// Books this thread's time while it lives. Bookings of a thread end in the reverse of the order in which they began.
class Booking {
 public:
  /// Books to `book` or, if that is null, to the book of the booking around it. Without either it does nothing. Some
  /// causes hold for all that happens inside them, and then it does nothing: see absorbs().
  Booking(BookedTime* book, Spent spent);
  explicit Booking(Spent spent) : Booking(nullptr, spent) {}
  ~Booking() {
    if (book_) close();
  }
  Booking(const Booking&) = delete;
  Booking& operator=(const Booking&) = delete;

 private:
  friend class Unbooked;
  void close() noexcept;
  void add(Clock::time_point until) noexcept;

  static inline thread_local Booking* innermost_ = nullptr;
  static inline thread_local int unbooked_ = 0;
  BookedTime* book_ = nullptr;  // null: does nothing
  Spent spent_;
  Booking* outer_ = nullptr;
  Clock::time_point since_;
};

/// While it lives, this thread is none of the program's, for example because it writes a checkpoint: nothing is
/// booked.
class Unbooked {
 public:
  Unbooked() { ++Booking::unbooked_; }
  ~Unbooked() { --Booking::unbooked_; }
  Unbooked(const Unbooked&) = delete;
  Unbooked& operator=(const Unbooked&) = delete;
};

/// A mutex that books the time for which a thread waits for it. `Mutex` is one of the standard library's.
template <class Mutex>
class BookedMutex : public Mutex {
 public:
  void lock() {
    if (Mutex::try_lock()) return;
    const Booking waits(Spent::threads);
    Mutex::lock();
  }
};

}  // namespace zeropage
