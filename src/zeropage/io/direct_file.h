// A file for transfers of any range. The whole disk blocks of a range bypass the page cache, at the disk's speed. The
// partial blocks at its two ends go through it. For programs that use the I/O module alone:
//
//   auto io = make_io();
//   const DirectFile file = DirectFile::open("weights.bin");
//   Ticket ticket = file.start(*io, Direction::read, offset, buffer, bytes);
//   ...
//   ticket.wait();  // throws DiskError that names the file, the offset and the sizes
//
// A range bypasses the page cache only if its address and its offset are equal modulo 4 KiB, like those of an Arena's
// block and an aligned offset. Otherwise all of it goes through the page cache.
#pragma once

#include <string>

#include "zeropage/io/io.h"

namespace zeropage {

class DirectFile {
 public:
  enum class Mode : std::uint8_t { read, update };
  /// Opens an existing file. Throws DiskError.
  static DirectFile open(const std::string& path, Mode mode = Mode::read);
  /// Creates a file of `bytes`, replacing an existing one. Throws DiskError if the disk has no room.
  static DirectFile create(const std::string& path, std::uint64_t bytes);

  /// Starts a transfer between [offset, offset + bytes) of the file and `buffer`; file and buffer must outlive it. A
  /// write past the end extends the file. Throws DiskError for a write to a file that was opened for reading.
  [[nodiscard]] Ticket start(Io& io, Direction direction, std::uint64_t offset, std::byte* buffer, std::size_t bytes,
                             Priority priority = Priority::demanded) const;
  /// Returns when all writes have reached the disk; its transfers must have ended. Throws DiskError.
  void sync() const { file_.sync(); }
  std::uint64_t size() const { return file_.size(); }
  const std::string& name() const { return file_.name(); }
  /// Whether the file system supports O_DIRECT.
  bool is_direct() const { return static_cast<bool>(direct_); }

 private:
  DirectFile(File file, Mode mode);

  Mode mode_;
  File file_, direct_;
};

}  // namespace zeropage
