// One region of memory on huge pages, from which every buffer that a disk reads into or writes from is cut.
// Physically contiguous buffers are worth a factor of two with O_DIRECT: the kernel pins one huge page instead of 512
// small ones.
//
// The region is mapped whole and touched as it is used, slab by slab; each slab is announced to a hook when it is
// first used, for registration with a ring or a device. A forked child does not see the region.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "zeropage/io/free_list.h"

namespace zeropage {

class Arena;

/// A block of an arena; gives its bytes back when it dies. Aligned to 4 KiB.
class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept { *this = std::move(other); }
  Block& operator=(Block&& other) noexcept;
  ~Block();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  friend class Arena;
  Block(Arena* arena, std::byte* data, std::size_t bytes) : arena_(arena), data_(data), bytes_(bytes) {}

  Arena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class Arena {
 public:
  using SlabHook = std::function<void(std::span<std::byte>)>;
  static constexpr std::size_t kSlabBytes = std::size_t{64} << 20;

  /// Throws BudgetError if the address space cannot be had. `capacity` is rounded up to a huge page.
  explicit Arena(std::size_t capacity, SlabHook on_first_use = {});
  /// Cuts blocks from memory that someone else holds: a device's.
  explicit Arena(std::span<std::byte> region);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Empty if no hole is large enough. Bytes are rounded up to 4 KiB.
  std::optional<Block> try_allocate(std::size_t bytes, FreeList::Side side = FreeList::Side::bottom);

  /// Moves a block and what it holds down to `to`, within holes and the block itself.
  void slide(Block& block, std::byte* to);

  std::size_t capacity() const { return capacity_; }
  std::byte* base() const { return base_; }

 private:
  friend class Block;
  void give_back(std::byte* data, std::size_t bytes);
  void announce(std::size_t offset, std::size_t bytes);

  std::mutex mutex_;
  std::byte* base_ = nullptr;
  std::size_t capacity_;
  bool mapped_ = true;  // by us
  FreeList free_;
  SlabHook on_first_use_;
  std::vector<bool> announced_;
};

}  // namespace zeropage
