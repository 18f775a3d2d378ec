// Writes ranges of one file at the disk's speed: what is given is copied into blocks of memory, which go to the disk
// past the page cache while the caller goes on. For files that others read later, as checkpoints are. One thread uses
// it at a time; several, of one process or of many, may write disjoint ranges of one file.
//
// [Note: edges] O_DIRECT moves whole disk blocks. What of a range shares one with its neighbours, at its two ends,
// goes through the page cache instead, byte by byte; so does everything where the file system has no O_DIRECT.
#pragma once

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

  /// Into `file`, which is open for writing, and has its size. Both outlive the writer.
  FileWriter(Io& io, const File& file, Priority priority = Priority::behind);
  /// What is under way ends first; what has not been flushed is lost.
  ~FileWriter() = default;

  /// `data` is copied, and may change afterwards. Waits while all buffers are on their way. Returns crc32c(crc,
  /// data). Throws DiskError if this write, or one before, failed.
  std::uint32_t write(std::uint64_t offset, std::span<const std::byte> data, std::uint32_t crc = 0);
  /// Returns when all has been written. Throws DiskError, and again at the next call unless all is written by then.
  void flush();
  /// The same, and it has reached the disk.
  void finish();

 private:
  struct Block {
    Buffer memory;  // lives longer than the ticket
    Ticket ticket;  // of the write under way
  };

  void begin(std::uint64_t offset);
  void send();

  Io& io_;
  const File& file_;
  const File direct_;
  const Priority priority_;
  std::vector<Block> blocks_;
  std::size_t current_ = 0;
  // What the current block has: file bytes [begin_, end_), of which base_ lies at its first byte.
  std::uint64_t base_ = 0, begin_ = 0, end_ = 0;
};

}  // namespace zeropage
