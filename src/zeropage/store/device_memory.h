// Memory that the CPU cannot address, and the order in which things are done to it: the seam between the pager and a
// GPU. It knows of streams; the pager knows of events alone. In tests it is a queue that runs as late as it may.
//
// [Note: streams and frames] Operators run on the calling thread's stream, long after they were asked for. Uploads
// and downloads run on streams of their own, so that they overlap operators and each other. What keeps them apart:
//   - the first use of a frame waits for the event of what filled it (stream_wait);
//   - a download waits for the event of the frame's last use;
//   - memory given up is retired with the event of its last use: what uploads into it, and operators that get it
//     next, wait for that, and nothing else does.
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

  /// The one block that frames are cut from, aligned to 4 KiB.
  virtual std::span<std::byte> region() = 0;

  // Among this thread's operators, in order:
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;  // both in device memory
  virtual void clear(std::byte* at, std::size_t bytes) = 0;
  /// An event after all that this thread has asked for.
  virtual Event record() = 0;
  /// What this thread asks for next waits for `event`.
  virtual void stream_wait(const Event& event) = 0;

  // Beside them:
  virtual Event upload(std::byte* to, const std::byte* from_host, std::size_t bytes) = 0;
  virtual Event download(std::byte* to_host, const std::byte* from, std::size_t bytes, const Event& after) = 0;
  /// Memory last used at `event` may be used again: uploads into it wait for that, and so do the operators of a
  /// thread that has called reuse() for it.
  virtual void retire(std::span<std::byte> memory, const Event& event) = 0;
  virtual void reuse(std::span<std::byte> memory) = 0;

  virtual bool done(const Event& event) = 0;
  virtual void wait(const Event& event) = 0;

  /// Whether register_host() does anything. Memory that is registered cannot be mapped anew (io/arena.h).
  virtual bool registers_host() const = 0;
  /// Makes host memory fast to transfer from, exactly these bytes, while the handle lives. Null if that cannot be
  /// had: transfers are then slower and nothing else changes.
  virtual std::shared_ptr<void> register_host(std::span<std::byte> memory) = 0;
};

}  // namespace zeropage
