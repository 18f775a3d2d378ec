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

/// A place of some bytes in the range, freed by its destructor. It is one piece where a hole is large enough, else
/// several: free space never fragments. Offsets and bytes are multiples of 4 KiB.
class Extent {
 public:
  struct Range {
    std::uint64_t offset;
    std::size_t bytes;
    FreeList::Entry entry;  // makes freeing it allocate nothing
  };

  Extent() = default;
  Extent(Extent&& other) noexcept { *this = std::move(other); }
  Extent& operator=(Extent&& other) noexcept {
    std::swap(file_, other.file_);
    std::swap(ranges_, other.ranges_);
    std::swap(is_spare_, other.is_spare_);
    return *this;
  }
  /// Takes the role of `other`, which holds needed content.
  void replace(Extent& other) noexcept { std::swap(is_spare_, other.is_spare_); }
  /// Marks its content as needed.
  void keep() noexcept { is_spare_ = false; }
  ~Extent();
  const std::vector<Range>& ranges() const { return ranges_; }
  std::size_t bytes() const;
  explicit operator bool() const { return file_ != nullptr; }

 private:
  friend class SwapFile;
  Extent(std::shared_ptr<SwapFile> file, std::vector<Range> ranges, bool is_spare)
      : file_(std::move(file)), ranges_(std::move(ranges)), is_spare_(is_spare) {}
  std::shared_ptr<SwapFile> file_;  // outlives its extents
  std::vector<Range> ranges_;
  bool is_spare_ = false;
};

class SwapFile : public std::enable_shared_from_this<SwapFile> {
 public:
  static constexpr double kSpare = 0.05;  // of the disk

  /// Measures the speeds of several disks three times in turn, writing 32 MiB to each and reading it again. Throws
  /// DiskError if a directory is missing, cannot be written, has no O_DIRECT, or fails.
  static std::shared_ptr<SwapFile> make(std::string_view disk_path, Io& io);
  /// `speeds`: one per directory, in any unit.
  static std::shared_ptr<SwapFile> make(const std::vector<std::string>& directories,
                                        const std::vector<double>& speeds);
  /// A range without a file, of at most `capacity` bytes: for planning.
  static std::shared_ptr<SwapFile> make_hollow(std::size_t capacity);

  /// Takes free space. Empty if the file has too little: grow() then. It calls no system function.
  Extent try_allocate(std::size_t bytes);
  /// Takes `bytes` more from the disk, for try_allocate(). Throws DiskError, with sizes, when the disk is full.
  void grow(std::size_t bytes);
  /// Grows the file if that is needed.
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
  /// The pieces of the extent's first `bytes`, in order.
  void for_each_piece(const Extent& extent, std::size_t bytes, const std::function<void(const Piece&)>& visit) const;
  /// Those of a part of the whole range.
  void for_each_piece(std::uint64_t offset, std::size_t bytes, const std::function<void(const Piece&)>& visit) const;

  std::size_t size() const;  // bytes of all files
  std::size_t used() const;  // bytes of it in extents

 private:
  friend class Extent;
  SwapFile(std::string_view disk_path, Io& io);
  SwapFile(const std::vector<std::string>& directories, const std::vector<double>& speeds);
  explicit SwapFile(std::size_t hollow_capacity);
  Extent take(std::size_t bytes, bool is_spare);
  void release(std::vector<Extent::Range>& ranges, bool is_spare) noexcept;
  std::size_t grow_once(std::size_t bytes);
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
  std::mutex growing_;                                // guards the disks' sizes; held during system calls
  std::vector<Disk> disks_;
  std::vector<Stripe> pattern_;  // of one period
  mutable std::mutex mutex_;     // guards what follows; taken after growing_, and never held for long
  std::size_t size_ = 0;
  FreeList free_;
  std::size_t spare_bytes_ = 0;  // free bytes reserved for try_allocate_spare()
};

/// The directories of a disk_path: one, or several separated by ':'. A directory whose own name contains ':' is one.
std::vector<std::string> split_disk_path(std::string_view disk_path);

}  // namespace zeropage
