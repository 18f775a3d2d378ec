// The place of a run's pages outside a cache's frames: on disk, in a lower cache, or in all ranks' shares. The cache
// treats them alike.
//
// A home keeps no state of pages. The cache never starts two transfers of a page at once, nor a read of a page before
// its write has ended.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "zeropage/io/io.h"
#include "zeropage/page/page.h"
#include "zeropage/store/device_memory.h"

namespace zeropage {

class Home {
 public:
  /// The outcome of a transfer: an error or null, and an event that users of a device's frame wait for.
  struct Outcome {
    std::exception_ptr error;
    DeviceMemory::Event ready;
  };
  /// Runs once, on any thread, with no cache lock held.
  using Done = std::function<void(Outcome)>;

  virtual ~Home() = default;

  /// For a run on disk: a slot for a page of `bytes`. Null if grow() must first make room. It never blocks.
  virtual SlotRef try_allocate(std::size_t) { return nullptr; }
  /// Makes room on the disk. Throws DiskError if it is full. Not under a lock.
  virtual void grow(std::size_t) {}
  /// For a run on disk: starts to read a slot of `bytes`.
  [[nodiscard]] virtual std::optional<Outcome> read_slot(const Slot&, std::size_t /*bytes*/, std::byte*, Priority,
                                                         Done) {
    return Outcome{};
  }
  /// The same for a part of an extent: `bytes` from `at` on, both multiples of 4 KiB. (Content in a file may have a
  /// checksum, so it is read whole.)
  [[nodiscard]] virtual std::optional<Outcome> read_part(const Extent&, std::size_t /*at*/, std::size_t /*bytes*/,
                                                         std::byte*, Priority, Done) {
    return Outcome{};
  }
  /// Starts to read a page into `into`. Returns an outcome if the read has ended already; then `done` is not called.
  /// With Priority::demanded it may block for memory below and throw BudgetError, DiskError or RankError. With other
  /// priorities it does not block; the cache calls it under its lock after ready_to_read() returned true.
  [[nodiscard]] virtual std::optional<Outcome> read(const Run& run, std::size_t page, std::byte* into,
                                                    Priority priority, Done done) = 0;
  /// The same for a write of the bytes at `from`, whose last use was `after`.
  [[nodiscard]] virtual std::optional<Outcome> write(const Run& run, std::size_t page, const std::byte* from,
                                                     const DeviceMemory::Event& after, Priority priority,
                                                     Done done) = 0;
  /// Whether a demanded transfer may block before it starts.
  virtual bool blocks() const { return true; }
  /// Whether a transfer can start without blocking. If not, the home may start to prepare it.
  virtual bool ready_to_read(const Run&, std::size_t) { return true; }
  virtual bool ready_to_write(const Run&, std::size_t) { return true; }
  /// Speeds up the transfer of a page into `frame`, for a thread that waits. Returns when it has ended or will end
  /// without help. Not under a lock; if the transfer needs no help, the run may be gone.
  virtual void hurry(const Run&, std::size_t, std::span<std::byte> frame) { (void)frame; }
  /// Ends transfers that finished without a signal, as a device's do. If `wait`, waits for the oldest. True if one
  /// ended. Throws a device's error, after its transfer has ended with it. Not under a lock.
  virtual bool tidy(bool wait) {
    (void)wait;
    return false;
  }
  /// Returns when the page below is no longer being read by transfers that have ended for the cache.
  virtual void finish_reads(const Run&, std::size_t) {}
  /// Drops what is kept for a run that dies or is frozen. It never waits: transfers that still read pages below keep
  /// those pages.
  virtual void forget(const Run&) noexcept {}
};

/// Extents of a swap file, and ranges of files that are only read.
std::unique_ptr<Home> make_disk_home(Io& io, SwapFile& file);

}  // namespace zeropage
