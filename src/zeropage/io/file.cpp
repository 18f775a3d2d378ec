#include "zeropage/io/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

/// Opens a file without a name, or returns -1 with errno. Some file systems have no O_TMPFILE: then it creates a file
/// and unlinks it.
int open_unnamed(const std::string& directory, int flags) {
  flags |= O_RDWR | O_CLOEXEC;
  const int descriptor = ::open(directory.c_str(), O_TMPFILE | O_EXCL | flags, 0600);
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

/// Some file systems accept O_DIRECT at open and then refuse transfers.
bool reads_direct(int descriptor) {
  std::unique_ptr<void, void (*)(void*)> block(std::aligned_alloc(kBlockBytes, kBlockBytes), std::free);
  return ::pread(descriptor, block.get(), kBlockBytes, 0) >= 0 || errno != EINVAL;
}

/// The same for writing: an empty file has nothing to read.
bool writes_direct(int descriptor) {
  std::unique_ptr<void, void (*)(void*)> block(std::aligned_alloc(kBlockBytes, kBlockBytes), std::free);
  std::memset(block.get(), 0, kBlockBytes);
  const ssize_t written = ::pwrite(descriptor, block.get(), kBlockBytes, 0);
  return written == static_cast<ssize_t>(kBlockBytes) || errno != EINVAL;
}

bool is_same_file(int one, int other) {
  struct stat a {
  }, b{};
  return ::fstat(one, &a) == 0 && ::fstat(other, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

[[noreturn]] void throw_cannot_page_to(const std::string& directory, int error) {
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) {
    throw DiskError(
        fmt::format("disk_path \"{}\" cannot be used: {}; make the directory or set disk_path to one that "
                    "exists",
                    directory, std::strerror(errno)),
        errno, directory);
  }
  if (!S_ISDIR(info.st_mode)) {
    throw DiskError(
        fmt::format("disk_path \"{}\" is not a directory; set disk_path to one on a local disk", directory), ENOTDIR,
        directory);
  }
  if (error == EINVAL) {
    throw DiskError(
        fmt::format("disk_path \"{}\" is on a file system without O_DIRECT; set disk_path to a directory on "
                    "a local disk (ext4, xfs, btrfs)",
                    directory),
        error, directory);
  }
  throw DiskError(fmt::format("disk_path \"{}\" cannot be written: {}; set disk_path to a directory you may write to",
                              directory, std::strerror(error)),
                  error, directory);
}

}  // namespace

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

File File::make_unnamed(const std::string& directory) {
  File file(open_unnamed(directory, O_DIRECT), fmt::format("the swap file in \"{}\"", directory));
  if (file.descriptor() < 0) throw_cannot_page_to(directory, errno);
  if (!writes_direct(file.descriptor())) throw_cannot_page_to(directory, EINVAL);
  struct statfs system {};
  if (::fstatfs(file.descriptor(), &system) == 0 && system.f_type == TMPFS_MAGIC) {  // Linux 6.6 gives it O_DIRECT
    throw DiskError(
        fmt::format("disk_path \"{}\" is in memory (tmpfs): set disk_path to a directory on a local disk, or "
                    "states to \"host\"",
                    directory),
        EINVAL, directory);
  }
  return file;
}

File File::create(const std::string& path, std::uint64_t bytes) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC;
  int descriptor = ::open(path.c_str(), kFlags | O_EXCL, 0666);
  const bool is_new = descriptor >= 0;
  if (!is_new && errno == EEXIST) descriptor = ::open(path.c_str(), kFlags, 0666);
  File file(descriptor, path);
  if (!file) {
    throw DiskError(
        fmt::format("\"{}\" cannot be made: {}; choose a folder that you may write to", path, std::strerror(errno)),
        errno, path);
  }
  if (bytes == 0) return file;
  int error = 0;
  do error = ::fallocate(file.descriptor(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  while (error == EINTR);
  if (error == EOPNOTSUPP) error = ::ftruncate(file.descriptor(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error == 0) return file;
  struct statvfs disk {};
  const bool known = ::statvfs(path.c_str(), &disk) == 0;
  // An older file may be a device or have other names, so it is not removed.
  is_new ? (void)::unlink(path.c_str()) : (void)!::ftruncate(file.descriptor(), 0);
  throw DiskError(
      fmt::format("\"{}\" needs {}, and {}: {}; make room there or choose another disk", path, format_bytes(bytes),
                  known ? format_bytes(disk.f_bavail * disk.f_frsize) + " are free on its disk"
                        : std::string("cannot have it"),
                  std::strerror(error)),
      error, path);
}

File File::open(const std::string& path, bool writable, bool direct) {
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | (direct ? O_DIRECT : 0);
  File file(::open(path.c_str(), flags), path);
  if (!file) throw DiskError(fmt::format("\"{}\" cannot be opened: {}", path, std::strerror(errno)), errno, path);
  return file;
}

File File::reopen_direct(bool writable) const {
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_DIRECT;
  File file(::open(fmt::format("/proc/self/fd/{}", descriptor_).c_str(), flags), name_);
  if (!file) {  // without /proc: by name, unless that is another file by now
    File named(::open(name_.c_str(), flags), name_);
    if (named && is_same_file(named.descriptor(), descriptor_)) file = std::move(named);
  }
  return file && reads_direct(file.descriptor()) ? std::move(file) : File();
}

File File::duplicate() const {
  File file(::fcntl(descriptor_, F_DUPFD_CLOEXEC, 0), name_);
  if (!file) {
    throw DiskError(fmt::format("{} cannot be opened again: {}", name_, std::strerror(errno)), errno, name_);
  }
  return file;
}

std::uint64_t File::size() const {
  struct stat info {};
  if (::fstat(descriptor_, &info) != 0) {
    throw DiskError(fmt::format("the size of {} cannot be read: {}", name_, std::strerror(errno)), errno, name_);
  }
  return static_cast<std::uint64_t>(info.st_size);
}

void File::read(std::uint64_t offset, std::byte* into, std::size_t bytes) const {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t got = ::pread(descriptor_, into + done, bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      throw DiskError(fmt::format("reading {} at {} of {} failed: {}", format_bytes(bytes), format_bytes(offset),
                                  name_, got < 0 ? std::strerror(errno) : "the file ends before"),
                      got < 0 ? errno : EIO, name_);
    }
    done += static_cast<std::size_t>(got);
  }
}

void File::write(std::uint64_t offset, const std::byte* from, std::size_t bytes) const {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t put = ::pwrite(descriptor_, from + done, bytes - done, static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      throw DiskError(fmt::format("writing {} at {} of {} failed: {}", format_bytes(bytes), format_bytes(offset),
                                  name_, put < 0 ? std::strerror(errno) : "nothing was written"),
                      put < 0 ? errno : EIO, name_);
    }
    done += static_cast<std::size_t>(put);
  }
}

void File::sync() const {
  if (::fdatasync(descriptor_) != 0) {
    throw DiskError(fmt::format("syncing {} failed: {}; check the disk", name_, std::strerror(errno)), errno, name_);
  }
}

void exchange_paths(const std::string& one, const std::string& other) {
  if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) return;
  const std::string aside = one + ".aside";
  bool moved = (errno == EINVAL || errno == ENOSYS) && ::rename(other.c_str(), aside.c_str()) == 0;
  if (moved && ::rename(one.c_str(), other.c_str()) != 0) {
    const int error = errno;
    ::rename(aside.c_str(), other.c_str());
    errno = error;
    moved = false;
  }
  if (!moved || ::rename(aside.c_str(), one.c_str()) != 0) {
    throw DiskError(fmt::format("\"{}\" cannot take the place of \"{}\": {}", one, other, std::strerror(errno)),
                    errno, other);
  }
}

}  // namespace zeropage
