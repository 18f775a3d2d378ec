#include "zeropage/store/swap_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

// Many tensors grow the file at once: fewer, larger extents in the file system too.
constexpr std::size_t kGrowBytes = 64 * kMiB;

}  // namespace

Extent::~Extent() {
  if (file_) file_->release(offset_, bytes_, is_spare_);
}

SwapFile::SwapFile(const std::string& directory) : directory_(directory), file_(File::make_unnamed(directory)) {}

Extent SwapFile::allocate(std::size_t bytes) {
  bytes = round_up(std::max<std::size_t>(bytes, 1), kBlockBytes);
  std::lock_guard lock(mutex_);
  auto offset = free_.take(bytes);
  if (!offset) {
    grow(bytes);
    offset = free_.take(bytes);
  }
  spare_bytes_ = std::min(spare_bytes_, free_.free_bytes());
  return Extent(this, *offset, bytes, /*is_spare=*/false);
}

Extent SwapFile::try_allocate_spare(std::size_t bytes) noexcept try {
  bytes = round_up(std::max<std::size_t>(bytes, 1), kBlockBytes);
  std::lock_guard lock(mutex_);
  auto offset = spare_bytes_ >= bytes ? free_.take(bytes) : std::nullopt;
  if (!offset) {
    if (!has_spare(std::max(bytes, kGrowBytes))) return {};
    const std::size_t before = size_;
    grow(bytes);
    spare_bytes_ += size_ - before;
    offset = free_.take(bytes);
  }
  spare_bytes_ -= bytes;
  return Extent(this, *offset, bytes, /*is_spare=*/true);
} catch (...) {
  return {};
}

bool SwapFile::has_spare(std::size_t bytes) const {
  struct statvfs disk {};
  if (::statvfs(directory_.c_str(), &disk) != 0) return false;
  const auto available = static_cast<double>(disk.f_bavail) * disk.f_frsize;
  return available - bytes >= kSpare * static_cast<double>(disk.f_blocks) * disk.f_frsize;
}

void SwapFile::grow(std::size_t bytes) {
  int error = 0;
  for (const std::size_t step : {std::max(bytes, kGrowBytes), bytes}) {
    int result;
    do result = ::fallocate(file_.descriptor(), 0, static_cast<off_t>(size_), static_cast<off_t>(step));
    while (result != 0 && errno == EINTR);
    if (result == 0) {
      free_.release(size_, step);
      size_ += step;
      return;
    }
    error = errno;
  }
  struct statvfs disk {};
  const std::size_t available = ::statvfs(directory_.c_str(), &disk) == 0 ? disk.f_bavail * disk.f_frsize : 0;
  throw DiskError(fmt::format(
      "disk_path \"{}\" cannot hold {} more ({}): the swap file has {}, the disk {} free; free some space, set "
      "disk_path "
      "to a larger disk, or move a role to another tier",
      directory_, format_bytes(bytes), std::strerror(error), format_bytes(size_), format_bytes(available)));
}

void SwapFile::release(std::uint64_t offset, std::size_t bytes, bool is_spare) {
  std::lock_guard lock(mutex_);
  free_.release(offset, bytes);
  if (is_spare) spare_bytes_ += bytes;
}

std::size_t SwapFile::size() const {
  std::lock_guard lock(mutex_);
  return size_;
}

std::size_t SwapFile::used() const {
  std::lock_guard lock(mutex_);
  return size_ - free_.free_bytes();
}

}  // namespace zeropage
