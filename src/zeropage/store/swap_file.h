// The disk tier of a space: a file without a name on each of its disks; together they form one range of bytes. They
// grow when a tensor is created, so a full disk is an error there and not in the middle of a step.
//
// [Note: stripes] The range is striped over the disks in units of 1 MiB, one request each. The pattern repeats, and a
// disk's number of stripes in it is proportional to its speed. A page thus comes from all disks at once, and
// neighbours in the range are neighbours on each disk.
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

/// A part of the range, freed by its destructor. Offset and bytes are multiples of 4 KiB.
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
  /// Takes the role of `other`, which holds needed content.
  void replace(Extent& other) noexcept { std::swap(is_spare_, other.is_spare_); }
  /// Marks its content as needed.
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

  /// Measures the speeds of several disks, writing 32 MiB to each and reading it again. Throws DiskError if a
  /// directory is missing, cannot be written, has no O_DIRECT, or fails.
  SwapFile(std::string_view disk_path, Io& io);
  /// `speeds`: one per directory, in any unit.
  SwapFile(const std::vector<std::string>& directories, const std::vector<double>& speeds);

  /// A range without a file, of at most `capacity` bytes: for planning.
  static std::unique_ptr<SwapFile> make_hollow(std::size_t capacity);

  /// Allocates space on the disk now. Throws DiskError, with sizes, when the disk is full.
  Extent allocate(std::size_t bytes);
  /// Allocates space for content that can be discarded. The file grows for it, unless that would use the last kSpare
  /// of the disk. Space that dead tensors left is not used: new tensors will want it. Returns none if there is no
  /// such space.
  Extent try_allocate_spare(std::size_t bytes) noexcept;

  /// A part of a range that is consecutive in one file.
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
    std::size_t index;  // among the disk's stripes in one period.
    std::size_t of;     // the number of those stripes.
  };

  std::size_t bytes_on(std::size_t disk, std::size_t size) const;
  int try_grow_to(std::size_t size, const Disk*& failed);

  const std::optional<std::size_t> hollow_capacity_;  // set if there is no file
  mutable std::mutex mutex_;
  std::vector<Disk> disks_;
  std::vector<Stripe> pattern_;  // of one period
  std::size_t size_ = 0;
  FreeList free_;
  std::size_t spare_bytes_ = 0;  // free bytes reserved for try_allocate_spare()
};

/// The directories of a disk_path: one, or several separated by ':'. A directory whose own name contains ':' is one.
std::vector<std::string> split_disk_path(std::string_view disk_path);

}  // namespace zeropage
