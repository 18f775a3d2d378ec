// A file for transfers of any range: the whole disk blocks of a range go past the page cache, at the disk's speed,
// and what shares a block with its neighbours, at the range's two ends, goes through it. For programs that use the
// I/O module alone:
//
//   auto io = make_io();
//   const DirectFile file = DirectFile::open("weights.bin");
//   Ticket ticket = file.start(*io, Direction::read, offset, buffer, bytes);
//   ...
//   ticket.wait();  // throws DiskError that names the file, the offset and the sizes
//
// A range is transferred past the page cache where its address and its offset are the same modulo 4 KiB, as those of
// an Arena's block and an aligned offset are; else all of it goes through the page cache.
#pragma once

#include <string>

#include "zeropage/io/io.h"

namespace zeropage {

class DirectFile {
 public:
  enum class Mode : std::uint8_t { read, update };
  /// One that exists. Throws DiskError.
  static DirectFile open(const std::string& path, Mode mode = Mode::read);
  /// A new file of `bytes`, in place of one that exists. Throws DiskError if the disk has no room.
  static DirectFile create(const std::string& path, std::uint64_t bytes);

  /// Starts a transfer between [offset, offset + bytes) of the file and `buffer`; file and buffer live until it ends.
  /// A write past the end makes the file longer. Throws DiskError for a write to a file that was opened for reading.
  [[nodiscard]] Ticket start(Io& io, Direction direction, std::uint64_t offset, std::byte* buffer, std::size_t bytes,
                             Priority priority = Priority::demanded) const;
  /// Returns when what was written has reached the disk; its transfers must have ended. Throws DiskError.
  void sync() const { file_.sync(); }
  std::uint64_t size() const { return file_.size(); }
  const std::string& name() const { return file_.name(); }
  /// Whether the file system has O_DIRECT.
  bool is_direct() const { return static_cast<bool>(direct_); }

 private:
  DirectFile(File file, Mode mode);

  Mode mode_;
  File file_, direct_;
};

}  // namespace zeropage
