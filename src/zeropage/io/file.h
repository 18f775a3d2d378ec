// An open file that closes itself, with the name that errors use.
#pragma once

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

  int descriptor() const { return descriptor_; }
  const std::string& name() const { return name_; }

 private:
  int descriptor_ = -1;
  std::string name_;
};

}  // namespace zeropage
