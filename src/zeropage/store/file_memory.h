// Memory whose content is in an unnamed file: its pages leave memory when they are not used. It holds what libtorch
// reads from an archive until a tensor takes it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace zeropage {

class FileMemory {
 public:
  /// `bytes` zeros in a file without a name in `folder`. Throws DiskError.
  FileMemory(const std::string& folder, std::size_t bytes);
  ~FileMemory();
  FileMemory(const FileMemory&) = delete;
  FileMemory& operator=(const FileMemory&) = delete;

  void* address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  /// Writes to the file; no page becomes resident. Throws DiskError.
  void write(std::size_t offset, const void* data, std::size_t bytes);
  /// Lets go of the pages that are in memory. Their content stays.
  void leave_memory() noexcept;

  /// For allocators: the memory is the context, and this deletes it.
  static void free(void* memory) { delete static_cast<FileMemory*>(memory); }
  /// How many live now.
  static int alive();

 private:
  std::string folder_;
  std::size_t bytes_;
  int file_ = -1;
  void* address_ = nullptr;
};

}  // namespace zeropage
