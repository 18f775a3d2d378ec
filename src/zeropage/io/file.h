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

  /// A file without a name in `directory`, mode 0600, for O_DIRECT: it is gone when the process is, however it ends,
  /// and nobody else can open it. Throws DiskError, saying which of the directory, the rights or O_DIRECT is missing.
  static File make_unnamed(const std::string& directory);
  /// A file of `bytes`, new or in place of what the file at this path held, whose space the file system has given.
  /// Throws DiskError, with sizes, if the disk is full; then a file that was there is there, empty, and no new one
  /// is.
  static File create(const std::string& path, std::uint64_t bytes);
  /// One that exists. `direct`: for O_DIRECT. Throws DiskError.
  static File open(const std::string& path, bool writable, bool direct = false);
  /// The same file for O_DIRECT, whatever has its name now; empty where the file system has none.
  File reopen_direct(bool writable) const;

  int descriptor() const { return descriptor_; }
  const std::string& name() const { return name_; }
  explicit operator bool() const { return descriptor_ >= 0; }
  std::uint64_t size() const;
  /// All of `bytes`, at once. Throws DiskError if there are fewer.
  void read(std::uint64_t offset, std::byte* into, std::size_t bytes) const;
  void write(std::uint64_t offset, const std::byte* from, std::size_t bytes) const;
  /// Returns when what was written has reached the disk.
  void sync() const;

 private:
  int descriptor_ = -1;
  std::string name_;
};

/// Two files or folders of one file system change places, in one step where the file system has that; else by way of
/// "<one>.aside", where a crash in between leaves `other`. Throws DiskError.
void exchange_paths(const std::string& one, const std::string& other);

}  // namespace zeropage
