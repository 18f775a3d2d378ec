// One region of memory on huge pages, which provides every buffer that a disk reads into or writes from. Physically
// contiguous buffers are twice as fast with O_DIRECT: the kernel merges neighbouring pages.
//
// [Note: no fragmentation] Blocks of many sizes come and go. Soon no hole is large enough, although all holes
// together are. Here several holes then become one. Their memory is mapped anew, one piece after another, at
// addresses kept free for this. mremap copies nothing and moves no block, and takes about 10 us a piece. Pieces are
// whole units. Cut pieces remain cut, and the kernel limits mappings (vm.max_map_count, 65,530 by default). When an
// arena has many, or pieces are small, the holes' memory goes back to the system and a new piece takes its place.
//
// [Note: huge pages stay whole] A piece smaller than a huge page splits it, and transfers of small pages run at a
// third of the speed. In a large arena the unit is therefore first a huge page. Blocks above half of one begin at a
// huge page, and smaller blocks fill the ends that these leave. Huge pages are cut only if half of the memory is free
// in smaller holes, or if the caller asks for it. A cut page that is free again is replaced by a whole one.
//
// Memory that is registered with a device cannot be mapped anew. With a hook, the region is used slab by slab, and
// the hook is called when a slab is first used.
//
// A forked child does not have the region. It may destroy blocks and the arena, and nothing else.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "zeropage/base/process.h"
#include "zeropage/io/free_list.h"

namespace zeropage {

class Arena;

/// A block of an arena, freed by its destructor. Aligned to 4 KiB.
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
  Block(Arena* arena, std::byte* data, std::size_t bytes, FreeList::Entry entry)
      : arena_(arena), data_(data), bytes_(bytes), entry_(std::move(entry)) {}

  Arena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  FreeList::Entry entry_;  // makes freeing it allocate nothing
};

class Arena {
 public:
  using SlabHook = std::function<void(std::span<std::byte>)>;
  static constexpr std::size_t kSlabBytes = std::size_t{64} << 20;

  /// Throws BudgetError if there is not enough address space. `capacity` is rounded up to a huge page.
  explicit Arena(std::size_t capacity, SlabHook on_first_use = {});
  /// For planning: addresses without memory, which behave like an arena with memory.
  static std::unique_ptr<Arena> make_hollow(std::size_t capacity);
  /// Uses memory that the caller owns, such as a device's.
  explicit Arena(std::span<std::byte> region);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Empty if no hole is large enough and none can be made. Bytes are rounded up to 4 KiB. `must`: cuts huge pages
  /// where that makes the hole ([Note: huge pages stay whole]). Throws AccessError in a forked child.
  std::optional<Block> try_allocate(std::size_t bytes, FreeList::Side side = FreeList::Side::bottom,
                                    bool must = true);
  /// Free bytes that are of no use to a block of `bytes`, unless it must be made: the ends of huge pages.
  std::size_t useless_to(std::size_t bytes) const;

  std::size_t capacity() const { return capacity_; }
  /// Whether holes can be joined. If not, all blocks are in [base, base + capacity).
  bool joins_holes() const { return span_ > capacity_; }
  std::byte* base() const { return base_; }

 private:
  friend class Block;
  struct Range {
    std::size_t offset, bytes;
  };
  struct Hollow {};
  Arena(std::size_t capacity, Hollow);
  void reserve_for(bool joins);
  bool is_forked() const { return process_ != process_generation(); }
  void reserve(std::size_t span);
  void give_back(std::byte* data, std::size_t bytes, FreeList::Entry entry) noexcept;
  void announce(std::size_t offset, std::size_t bytes);
  bool keeps_pages_whole() const { return joins_holes() && page_ > unit_; }
  std::optional<std::size_t> take(std::size_t bytes, FreeList::Side side, bool aligns);
  bool join_holes(std::size_t bytes, std::size_t unit);
  bool join_loose();
  void cut_mapping(std::size_t at);
  std::vector<Range> mappings_in(Range range);
  std::vector<Range> pieces_of(Range hole, std::size_t unit);
  void make_whole(Range free) noexcept;
  bool map_anew(Range mapping, std::size_t to);
  std::size_t move(const std::vector<Range>& holes, std::size_t unit, Range to);
  std::size_t replace(const std::vector<Range>& holes, Range to);
  bool map(Range range, int protection);

  mutable std::mutex mutex_;
  std::byte* base_ = nullptr;
  std::size_t capacity_;
  std::size_t span_;      // of addresses
  std::size_t unit_ = 0;  // of joining holes
  std::size_t page_ = 0;  // a huge page; in a small arena, a unit
  bool has_cut_ = false;  // a huge page
  int protection_ = 0;    // of memory
  bool mapped_ = true;    // by this class
  const std::uint64_t process_ = process_generation();
  FreeList free_{page_ > unit_ ? page_ : 0};     // memory; its small ranges are holes within a huge page
  FreeList bare_;                                // addresses without memory
  std::map<std::size_t, std::size_t> mappings_;  // that the kernel may keep separate: offset to bytes
  SlabHook on_first_use_;
  std::vector<bool> announced_;
};

}  // namespace zeropage
