// An open file that closes itself, with the name that errors use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace zeropage {

class File {
 public:
  File() = default;
  File(int descriptor, std::string name) : descriptor_(descriptor), name_(std::move(name)) {}
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(name_, other.name_);
    return *this;
  }
  ~File();

  /// Creates a file without a name in `directory`, mode 0600, for O_DIRECT. It vanishes with the process, however
  /// that ends, and no other process can open it by name. Throws DiskError that says whether the directory, the
  /// rights or O_DIRECT is missing.
  static File make_unnamed(const std::string& directory);
  /// Creates or overwrites a file of `bytes`, and allocates its space. Throws DiskError, with sizes, if the disk is
  /// full. Then a file that existed is left empty, and a new one is removed.
  static File create(const std::string& path, std::uint64_t bytes);
  /// Opens an existing file. `direct`: for O_DIRECT. Throws DiskError.
  static File open(const std::string& path, bool writable, bool direct = false);
  /// Opens the same file for O_DIRECT, even if its name now belongs to another. Empty if the file system has no
  /// O_DIRECT.
  File reopen_direct(bool writable) const;

  /// Another descriptor of the same open file. Throws DiskError.
  File duplicate() const;

  int descriptor() const { return descriptor_; }
  const std::string& name() const { return name_; }
  explicit operator bool() const { return descriptor_ >= 0; }
  std::uint64_t size() const;
  /// Transfers all of `bytes`, and blocks. Throws DiskError if there are fewer.
  void read(std::uint64_t offset, std::byte* into, std::size_t bytes) const;
  void write(std::uint64_t offset, const std::byte* from, std::size_t bytes) const;
  /// Returns when all writes have reached the disk.
  void sync() const;

 private:
  int descriptor_ = -1;
  std::string name_;
};

/// Exchanges two files or folders of one file system. The exchange is atomic if the file system supports that. Else
/// it goes by way of "<one>.aside", where a crash in between leaves `other`. Throws DiskError.
void exchange_paths(const std::string& one, const std::string& other);

}  // namespace zeropage
