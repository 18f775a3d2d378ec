// Where a run's pages are when they are not in a cache's frames: on disk, in a lower cache, or in every rank's
// shares. To the cache they are the same.
//
// A home keeps no state of pages. The cache never starts two transfers of one page at once, nor a read before a write
// of the same page has ended.
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
  /// How a transfer ended: an error, or none, and an event that users of a device's frame wait for.
  struct Outcome {
    std::exception_ptr error;
    DeviceMemory::Event ready;
  };
  /// Runs once, on any thread, with no cache's lock held.
  using Done = std::function<void(Outcome)>;

  virtual ~Home() = default;

  /// Of a run on disk: room for its pages. Throws DiskError if the disk is full.
  virtual std::shared_ptr<Backing> allocate(std::size_t) { return nullptr; }
  /// Of a run on disk: starts to read from a backing, in which the run's pages lie or lay.
  [[nodiscard]] virtual std::optional<Outcome> read_backing(const Backing&, std::uint64_t /*offset*/,
                                                            std::size_t /*bytes*/, std::byte*, Priority, Done) {
    return Outcome{};
  }
  /// Starts to bring a page to `into`. Returns an outcome if it has ended already; then `done` is not called. With
  /// Priority::demanded it may block for memory below and throw BudgetError, DiskError or RankError; otherwise it
  /// does not block, and is called under the cache's lock where ready_to_read said yes.
  [[nodiscard]] virtual std::optional<Outcome> read(const Run& run, std::size_t page, std::byte* into,
                                                    Priority priority, Done done) = 0;
  /// The same for a write of what lies at `from` and was last used at `after`.
  [[nodiscard]] virtual std::optional<Outcome> write(const Run& run, std::size_t page, const std::byte* from,
                                                     const DeviceMemory::Event& after, Priority priority,
                                                     Done done) = 0;
  /// Whether a demanded transfer may wait for something before it starts.
  virtual bool blocks() const { return true; }
  /// Whether a transfer can start without blocking. If not, the home may begin what makes it so.
  virtual bool ready_to_read(const Run&, std::size_t) { return true; }
  virtual bool ready_to_write(const Run&, std::size_t) { return true; }
  /// A thread waits for the transfer of a page into `frame`: returns when it has ended or will end without help. Not
  /// under a lock; the run may be gone where a transfer needs no help.
  virtual void hurry(const Run&, std::size_t, std::span<std::byte> frame) { (void)frame; }
  /// Ends what has come to its end without a word, as transfers of a device do; waits for the oldest of them if
  /// `wait`. True if one ended. Not under a lock.
  virtual bool tidy(bool wait) {
    (void)wait;
    return false;
  }
  /// Returns when no transfer that has ended for the cache still reads the page below.
  virtual void finish_reads(const Run&, std::size_t) {}
  /// Returns when nothing reads what the run is below: before it dies, or is replaced there.
  virtual void forget(const Run&) {}
};

/// Extents of a swap file, and ranges of files that are only read.
std::unique_ptr<Home> make_disk_home(Io& io, SwapFile& file);

}  // namespace zeropage
