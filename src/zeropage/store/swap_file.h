// The disk tier: one file without a name per space, grown when a tensor is created, so that a full disk is an error
// there and not in the middle of a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "zeropage/io/file.h"
#include "zeropage/io/free_list.h"

namespace zeropage {

class SwapFile;

/// A range of the swap file; returns it when it dies. Offset and bytes are multiples of 4 KiB.
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
  /// Two of one size change places in the file.
  void swap_places(Extent& other) noexcept { std::swap(offset_, other.offset_); }
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

  /// Throws DiskError if the directory is missing, cannot be written, or has no O_DIRECT.
  explicit SwapFile(const std::string& directory);

  /// Space on the disk, given by the file system now. Throws DiskError, with sizes, when the disk is full.
  Extent allocate(std::size_t bytes);
  /// Space that nothing depends on: the file grows for it, unless that took the last kSpare of the disk; it takes
  /// none that tensors left behind, which they will want again. None if there is no such space.
  Extent try_allocate_spare(std::size_t bytes) noexcept;

  const File& file() const { return file_; }
  std::size_t size() const;  // bytes of the file
  std::size_t used() const;  // bytes of it in extents

 private:
  friend class Extent;
  void release(std::uint64_t offset, std::size_t bytes, bool is_spare);
  void grow(std::size_t bytes);
  bool has_spare(std::size_t bytes) const;

  mutable std::mutex mutex_;
  std::string directory_;
  File file_;
  std::size_t size_ = 0;
  FreeList free_;
  std::size_t spare_bytes_ = 0;  // of what is free, for try_allocate_spare
};

}  // namespace zeropage
