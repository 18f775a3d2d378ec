// Asynchronous transfers between files and memory: submit reads and writes, each with a ticket of its own; wait for
// one, or for all. This is the seam under the pager: io_uring, a thread pool, and in tests a disk that is short, late
// or full. It knows nothing of tensors and can be used alone.
//
// Offsets, sizes and addresses are multiples of 4 KiB when the file was opened with O_DIRECT.
// All functions may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "zeropage/io/file.h"

namespace zeropage {

enum class Direction : std::uint8_t { read, write };

struct Transfer {
  Direction direction;
  const File* file;      // lives until the ticket is waited for
  std::uint64_t offset;  // bytes
  std::byte* buffer;     // lives until the ticket is waited for
  std::size_t bytes;
};

/// Who a ticket waits with: an Io, or what moves bytes between a device and the host.
class TicketIssuer;

/// A transfer under way. Move-only. Whoever drops one without waiting still waits here, so that no buffer is reused
/// under a disk; the result is then lost, which only an unwinding stack may do.
class Ticket {
 public:
  struct State;  // an implementation's own

  Ticket() = default;
  Ticket(TicketIssuer* issuer, std::shared_ptr<State> state) : issuer_(issuer), state_(std::move(state)) {}
  Ticket(Ticket&& other) noexcept { *this = std::move(other); }
  Ticket& operator=(Ticket&& other) noexcept {
    std::swap(issuer_, other.issuer_);
    std::swap(state_, other.state_);
    return *this;
  }
  ~Ticket();

  /// Returns when the transfer is complete. Throws DiskError, naming the file, the offset and the sizes, if it failed
  /// or was short. Waiting again, or for an empty ticket, returns at once.
  void wait();
  bool done() const;
  explicit operator bool() const { return state_ != nullptr; }

  /// Forgets the transfer without waiting: only for a forked child, in which it does not exist.
  void abandon() noexcept;

 private:
  TicketIssuer* issuer_ = nullptr;
  std::shared_ptr<State> state_;
};

class TicketIssuer {
 public:
  virtual ~TicketIssuer() = default;

 protected:
  friend class Ticket;
  /// Returns when the transfer is over; the ticket then looks at its outcome.
  virtual void wait(Ticket::State& state) = 0;
  virtual bool done(const Ticket::State& state) = 0;
};

class Io : public TicketIssuer {
 public:
  /// Starts a transfer. Waits for nothing but room in the queue.
  [[nodiscard]] virtual Ticket submit(const Transfer& transfer) = 0;
  /// Returns when all that was submitted is complete; results stay with their tickets.
  virtual void wait_all() = 0;
  /// Returns when what was written to `file` has reached the disk. Throws DiskError.
  virtual void sync(const File& file);
  /// Memory that transfers will use, to be registered with the kernel if that makes them faster.
  virtual void register_memory(std::span<std::byte> memory) { (void)memory; }
  virtual std::string_view name() const = 0;
};

enum class IoEngine : std::uint8_t { automatic, uring, threads };

/// automatic: io_uring where it is built and allowed, else threads; which one is said once, on standard error, if it
/// is not io_uring. Throws SettingError for IoEngine::uring where that cannot be had.
std::unique_ptr<Io> make_io(IoEngine engine = IoEngine::automatic);

}  // namespace zeropage
