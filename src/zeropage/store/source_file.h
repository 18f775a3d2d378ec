// A file that others wrote, and in which tensors lie that have not been written since: their pages are read from it,
// and it is never written. It stays open, so that it may be renamed, replaced or deleted; what may not change are its
// bytes.
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

  const std::string& name() const { return file_.name(); }
  std::uint64_t size() const { return size_; }
  int descriptor() const { return file_.descriptor(); }
  /// To read `bytes` at `offset` from: past the page cache, where whole blocks are asked for and the file system can.
  const File& file_for(std::uint64_t offset, std::size_t bytes) const;
  /// Throws DiskError if size or time of the last change are not what they were when it was opened: then nobody knows
  /// what was read.
  void check() const;

 private:
  const File file_, direct_;
  std::uint64_t size_ = 0;
  struct timespec changed_ {};
};

/// Where in a file something begins.
struct SourceRange {
  std::shared_ptr<const SourceFile> file;
  std::uint64_t offset = 0;
  explicit operator bool() const { return file != nullptr; }
};

}  // namespace zeropage
