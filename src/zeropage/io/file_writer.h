// Writes ranges of one file at the disk's speed. It copies data into blocks of memory, which go to the disk past the
// page cache while the caller continues. For files that others read later, such as checkpoints. One thread uses a
// writer at a time. Several writers, in one process or many, may write disjoint ranges of one file.
//
// [Note: edges] O_DIRECT transfers whole disk blocks. The partial blocks at the two ends of a range go through the
// page cache instead, byte by byte. A file system without O_DIRECT uses the page cache for everything.
#pragma once

#include <exception>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "zeropage/io/buffers.h"
#include "zeropage/io/io.h"

namespace zeropage {

class FileWriter {
 public:
  static constexpr std::size_t kBufferBytes = 4 * kMiB;
  static constexpr std::size_t kBuffers = 3;

  /// Runs the given work and returns when it has ended.
  using Run = std::function<void(const std::function<void()>&)>;

  /// Writes to `file`, which is open for writing and has its final size. `io` and `file` outlive the writer. `run`
  /// runs the copies and checksums of more than 32 KiB, a block at a time; the calling thread runs all else.
  FileWriter(Io& io, const File& file, Priority priority = Priority::behind, Run run = nullptr);
  /// Waits for writes in flight. Data that was not flushed is lost.
  ~FileWriter() = default;

  /// Copies `data`, which may change afterwards. Waits while all buffers are in flight. Returns crc32c(crc, data).
  /// Throws DiskError if this write, or an earlier one, failed.
  std::uint32_t write(std::uint64_t offset, std::span<const std::byte> data, std::uint32_t crc = 0);
  /// Returns when all data is written. Throws DiskError, and again at the next call unless all is written by then.
  void flush();
  /// The same, and the data has reached the disk. If that fails once, all later calls throw DiskError: the kernel
  /// then drops the data and reports the next attempt as a success.
  void finish();

 private:
  struct Block {
    Buffer memory;  // outlives the ticket
    Ticket ticket;  // of the write in flight
  };

  void begin(std::uint64_t offset);
  std::uint32_t fill(std::span<const std::byte> data, std::uint32_t crc);
  void send();

  Io& io_;
  const File& file_;
  const File direct_;
  const Priority priority_;
  const Run run_;
  std::vector<Block> blocks_;
  std::size_t current_ = 0;
  std::exception_ptr failed_sync_;
  // The current block holds file bytes [begin_, end_). Its first byte is that at base_.
  std::uint64_t base_ = 0, begin_ = 0, end_ = 0;
};

}  // namespace zeropage
