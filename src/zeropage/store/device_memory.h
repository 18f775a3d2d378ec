// Memory that the CPU cannot address, and the order of work on it: the interface between the pager and a GPU. It
// knows of streams; the pager only knows of events. In tests it is a queue that runs as late as it may.
//
// [Note: streams and frames] Operators run on the calling thread's stream, long after they were requested. Uploads,
// downloads and gathers ahead run on streams of their own, so that they overlap operators and each other. Three rules
// keep them apart:
//   - the first use of a frame waits for the event of the transfer that filled it (stream_wait);
//   - a download, or a gather of a share, waits for the event of the frame's last use;
//   - freed memory is retired with the event of its last use: only uploads into it, and the operators that get it
//     next, wait for that event.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace zeropage {

class DeviceMemory {
 public:
  /// A point in the device's work. Null: already past.
  using Event = std::shared_ptr<void>;

  virtual ~DeviceMemory() = default;

  /// The one block that holds all frames, aligned to 4 KiB.
  virtual std::span<std::byte> region() = 0;

  // In the order of this thread's operators:
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;  // both in device memory
  virtual void clear(std::byte* at, std::size_t bytes) = 0;
  /// An event after all work that this thread has requested.
  virtual Event record() = 0;
  /// Waits for that work.
  virtual void finish() = 0;
  /// Makes this thread's next requests wait for `event`.
  virtual void stream_wait(const Event& event) = 0;
  /// While the handle lives, this thread's requests, and what it asks of torch, go to a stream for gathers. They then
  /// wait only for operators whose events they get.
  virtual std::shared_ptr<void> aside() { return nullptr; }

  // Concurrently with operators. If one of these throws, nothing that it asked for is under way.
  virtual Event upload(std::byte* to, const std::byte* from_host, std::size_t bytes) = 0;
  virtual Event download(std::byte* to_host, const std::byte* from, std::size_t bytes, const Event& after) = 0;
  /// Frees memory that was last used at `event`. Uploads into it wait for that event, and so do the operators of a
  /// thread that has called reuse() for it.
  virtual void retire(std::span<std::byte> memory, const Event& event) = 0;
  virtual void reuse(std::span<std::byte> memory) = 0;

  virtual bool done(const Event& event) = 0;
  virtual void wait(const Event& event) = 0;

  /// Whether register_host() has an effect. Registered memory cannot be mapped anew (io/arena.h).
  virtual bool registers_host() const = 0;
  /// Makes transfers of exactly these bytes of host memory fast while the handle lives. Null if it cannot: transfers
  /// are then slower and nothing else changes.
  virtual std::shared_ptr<void> register_host(std::span<std::byte> memory) = 0;
};

}  // namespace zeropage
