// The disk tier of a space: a file without a name on each of its disks, which together are one range of bytes. They
// grow when a tensor is created, so that a full disk is an error there and not in the middle of a step.
//
// [Note: stripes] The range goes over the disks in stripes of 1 MiB, one request each, by a pattern that repeats and
// in which a disk has as many places as it is fast. So a page comes from all of them at once, and what is near in the
// range is near on each.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zeropage/io/file.h"
#include "zeropage/io/free_list.h"
#include "zeropage/io/io.h"

namespace zeropage {

class SwapFile;

/// A part of the range; returns it when it dies. Offset and bytes are multiples of 4 KiB.
class Extent {
 public:
  Extent() = default;
  Extent(Extent&& other) noexcept { *this = std::move(other); }
  Extent& operator=(Extent&& other) noexcept {
    std::swap(file_, other.file_);
    std::swap(offset_, other.offset_);
    std::swap(bytes_, other.bytes_);
    std::swap(is_spare_, other.is_spare_);
    return *this;
  }
  /// This one takes the place of `other`, which something depended on.
  void replace(Extent& other) noexcept { std::swap(is_spare_, other.is_spare_); }
  /// Something depends on it from now on.
  void keep() noexcept { is_spare_ = false; }
  ~Extent();
  std::uint64_t offset() const { return offset_; }
  std::size_t bytes() const { return bytes_; }
  explicit operator bool() const { return file_ != nullptr; }

 private:
  friend class SwapFile;
  Extent(SwapFile* file, std::uint64_t offset, std::size_t bytes, bool is_spare)
      : file_(file), offset_(offset), bytes_(bytes), is_spare_(is_spare) {}
  SwapFile* file_ = nullptr;
  std::uint64_t offset_ = 0;
  std::size_t bytes_ = 0;
  bool is_spare_ = false;
};

class SwapFile {
 public:
  static constexpr double kSpare = 0.05;  // of the disk

  /// `directories`: as of disk_path. Of several, how fast they are is measured, with 32 MiB written to each and read
  /// again. Throws DiskError if one is missing, cannot be written, has no O_DIRECT, or fails.
  SwapFile(std::string_view disk_path, Io& io);
  /// `speeds`: of each directory, in any unit.
  SwapFile(const std::vector<std::string>& directories, const std::vector<double>& speeds);

  /// A range with no file behind it, of at most that many bytes: for planning.
  static std::unique_ptr<SwapFile> make_hollow(std::size_t capacity);

  /// Space on the disk, given by the file system now. Throws DiskError, with sizes, when the disk is full.
  Extent allocate(std::size_t bytes);
  /// Space that nothing depends on: the file grows for it, unless that took the last kSpare of the disk; it takes
  /// none that tensors left behind, which they will want again. None if there is no such space.
  Extent try_allocate_spare(std::size_t bytes) noexcept;

  /// What of a range lies in one file without a gap.
  struct Piece {
    const File* file;
    std::uint64_t offset;  // in the file
    std::size_t at;        // in the range
    std::size_t bytes;
  };
  /// The range's pieces, in order.
  void for_each_piece(std::uint64_t offset, std::size_t bytes, const std::function<void(const Piece&)>& visit) const;

  std::size_t size() const;  // bytes of all files
  std::size_t used() const;  // bytes of it in extents

 private:
  friend class Extent;
  explicit SwapFile(std::size_t hollow_capacity);
  void release(std::uint64_t offset, std::size_t bytes, bool is_spare);
  void grow(std::size_t bytes);
  bool has_spare(std::size_t bytes) const;

  struct Disk {
    std::string directory;
    File file;
    dev_t device;          // of the file system
    std::size_t size = 0;  // bytes of the file
  };
  struct Stripe {
    std::size_t disk;
    std::size_t index;  // among the disk's stripes of one period
    std::size_t of;     // how many there are
  };

  std::size_t bytes_on(std::size_t disk, std::size_t size) const;
  int try_grow_to(std::size_t size, const Disk*& failed);

  const std::optional<std::size_t> hollow_capacity_;  // where there is no file
  mutable std::mutex mutex_;
  std::vector<Disk> disks_;
  std::vector<Stripe> pattern_;  // of one period
  std::size_t size_ = 0;
  FreeList free_;
  std::size_t spare_bytes_ = 0;  // of what is free, for try_allocate_spare
};

/// The directories that a disk_path names: one, or several with ':' between them. A directory whose name has a ':' is
/// one.
std::vector<std::string> split_disk_path(std::string_view disk_path);

}  // namespace zeropage
