#include "zeropage/io/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

/// Opens a file without a name, or -1 with errno. Some file systems have no O_TMPFILE: make one and unlink it.
int open_unnamed(const std::string& directory, int flags) {
  flags |= O_RDWR | O_CLOEXEC;
  const int descriptor = ::open(directory.c_str(), O_TMPFILE | flags, 0600);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return descriptor;
  std::string name = directory + "/.zeropage-XXXXXX";
  const int made = ::mkostemp(name.data(), flags & ~(O_RDWR | O_DIRECT));
  if (made < 0) return made;
  ::unlink(name.c_str());
  if ((flags & O_DIRECT) && ::fcntl(made, F_SETFL, O_DIRECT) != 0) {
    ::close(made);
    errno = EINVAL;
    return -1;
  }
  return made;
}

/// Some file systems accept the flag and refuse the write.
bool writes_direct(int descriptor) {
  std::unique_ptr<void, void (*)(void*)> block(std::aligned_alloc(kBlockBytes, kBlockBytes), std::free);
  std::memset(block.get(), 0, kBlockBytes);
  const ssize_t written = ::pwrite(descriptor, block.get(), kBlockBytes, 0);
  return written == static_cast<ssize_t>(kBlockBytes) || errno != EINVAL;
}

[[noreturn]] void throw_cannot_page_to(const std::string& directory, int error) {
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) {
    throw DiskError(
        fmt::format("disk_path \"{}\" cannot be used: {}; make the directory or set disk_path to one that "
                    "exists",
                    directory, std::strerror(errno)));
  }
  if (!S_ISDIR(info.st_mode)) {
    throw DiskError(
        fmt::format("disk_path \"{}\" is not a directory; set disk_path to one on a local disk", directory));
  }
  if (error == EINVAL) {
    throw DiskError(
        fmt::format("disk_path \"{}\" is on a file system without O_DIRECT; set disk_path to a directory on "
                    "a local disk (ext4, xfs, btrfs)",
                    directory));
  }
  throw DiskError(fmt::format("disk_path \"{}\" cannot be written: {}; set disk_path to a directory you may write to",
                              directory, std::strerror(error)));
}

}  // namespace

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

File File::make_unnamed(const std::string& directory) {
  File file(open_unnamed(directory, O_DIRECT), fmt::format("the swap file in \"{}\"", directory));
  if (file.descriptor() < 0) throw_cannot_page_to(directory, errno);
  if (!writes_direct(file.descriptor())) throw_cannot_page_to(directory, EINVAL);
  return file;
}

}  // namespace zeropage
