// Asynchronous transfers between files and memory. Start one with a completion that runs when it ends, or with a
// ticket to wait for. This is the interface under the cache. It has implementations for io_uring and a thread pool,
// and in tests a disk that is short, late or full. It knows nothing of tensors and can be used alone.
//
// Offsets, sizes and addresses are multiples of 4 KiB when the file was opened with O_DIRECT.
// All functions may be called from any thread.
//
// [Note: forked children] A child has neither the threads of an Io nor its transfers in flight. In a child, starting
// a transfer or waiting for an unfinished one throws AccessError, and destructors leave everything as it is. No
// thread would end the wait, and threads that the child lacks may hold locks. A child makes an Io of its own.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "zeropage/base/units.h"
#include "zeropage/io/file.h"

namespace zeropage {

enum class Direction : std::uint8_t { read, write };

/// The order of transfers that exceed the disk's capacity.
enum class Priority : std::uint8_t {
  demanded,    // a thread waits for it
  ahead,       // a read that a thread will wait for
  behind,      // a write that frees memory later
  background,  // no thread waits for it; all others go first
};
inline constexpr int kPriorities = 4;

struct Transfer {
  Direction direction;
  const File* file;      // lives until the transfer ends
  std::uint64_t offset;  // bytes
  std::byte* buffer;     // lives until the transfer ends
  std::size_t bytes;
};

/// Runs once when a transfer ends, on a thread of the Io that holds no lock. The argument is null on success, else a
/// DiskError that names the file, the offset and the sizes. It must not throw and must not wait for a transfer.
using Completion = std::function<void(std::exception_ptr)>;

/// A transfer in flight. Move-only. The destructor blocks until the transfer ends and discards its result. Several
/// threads may wait for one ticket at once. See [Note: forked children].
class Ticket {
 public:
  Ticket() = default;
  Ticket(Ticket&& other) noexcept { *this = std::move(other); }
  Ticket& operator=(Ticket&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Ticket();

  /// Returns when the transfer has ended. Throws DiskError, at every call, if it failed or was short. An empty ticket
  /// has ended.
  void wait() const;
  /// The same, but returns false if it has not ended by `deadline`; the caller can wait again.
  bool wait_until(std::chrono::steady_clock::time_point deadline) const;
  /// Whether wait() would return or throw at once.
  bool done() const;
  explicit operator bool() const { return state_ != nullptr; }

  /// A ticket that ends when the completion has run. The completion must run.
  static std::pair<Ticket, Completion> pending();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

class Io {
 public:
  virtual ~Io() = default;

  /// Starts a transfer and returns at once.
  virtual void start(const Transfer& transfer, Priority priority, Completion completion) = 0;
  /// The same for a caller that will wait.
  [[nodiscard]] Ticket submit(const Transfer& transfer, Priority priority = Priority::demanded);
  /// Moves queued reads and writes whose buffers begin in `memory` to the front, for a thread that waits.
  virtual void expedite(std::span<const std::byte> memory) { (void)memory; }
  /// Returns when all transfers that were started before have ended and their completions have run.
  virtual void wait_all() = 0;
  /// Returns when all writes to `file` that were started before have reached the disk. Throws DiskError.
  virtual void sync(const File& file);
  virtual std::string_view name() const = 0;
};

enum class IoEngine : std::uint8_t { automatic, uring, threads };

struct IoOptions {
  /// automatic: io_uring if it is built and allowed, else threads. Reports the use of threads once, on standard
  /// error.
  IoEngine engine = IoEngine::automatic;
  std::size_t block_bytes = kMiB;  // largest request that transfers are cut into; a multiple of 4 KiB
  std::size_t depth = 0;           // most requests in flight, 1 to 1,024; 0: 32 for io_uring, 16 for threads
};

/// Throws ConfigError for IoEngine::uring if it is not available, and for numbers out of range.
std::unique_ptr<Io> make_io(const IoOptions& options = {});

}  // namespace zeropage
