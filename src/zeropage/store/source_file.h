// A foreign file that contains tensors which have not been written since loading. Their pages are read from it; it is
// never written. It stays open, so it may be renamed, replaced or deleted, but its bytes may not change.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>

#include "zeropage/io/file.h"

namespace zeropage {

class SourceFile {
 public:
  /// Throws DiskError if it cannot be opened.
  explicit SourceFile(const std::string& path);
  explicit SourceFile(File file);

  const std::string& name() const { return file_.name(); }
  std::uint64_t size() const { return size_; }
  int descriptor() const { return file_.descriptor(); }
  /// The file to read `bytes` at `offset` from. It bypasses the page cache if the range is whole blocks and the file
  /// system supports that.
  const File& file_for(std::uint64_t offset, std::size_t bytes) const;
  /// Throws DiskError if the size or the time of the last change differs from that at opening: reads are then
  /// unreliable.
  void check() const;

 private:
  const File file_, direct_;
  std::uint64_t size_ = 0;
  struct timespec changed_ {};
};

/// A position in a file.
struct SourceRange {
  std::shared_ptr<const SourceFile> file;
  std::uint64_t offset = 0;
  explicit operator bool() const { return file != nullptr; }
};

}  // namespace zeropage
