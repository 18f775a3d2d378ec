// Free ranges of a linear space: a file, or a region of memory. It uses best fit and merges neighbours at once. Equal
// sequences of allocations and frees therefore give equal layouts, and holes do not multiply. Not thread-safe; holds
// no resource.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace zeropage {

class FreeList {
 public:
  enum class Side { bottom, top };

  /// Ranges of fewer than `small` bytes are counted apart.
  explicit FreeList(std::size_t small = 0) : small_(small) {}

  /// The list nodes of one range. With an entry, release() allocates nothing and cannot fail.
  struct Entry {
    std::map<std::size_t, std::size_t>::node_type by_offset;
    std::set<std::pair<std::size_t, std::size_t>>::node_type by_size;
  };
  static Entry make_entry();

  /// Adds [offset, offset + bytes), which must not overlap a free range.
  void release(std::size_t offset, std::size_t bytes) { release(offset, bytes, make_entry()); }
  void release(std::size_t offset, std::size_t bytes, Entry entry) noexcept;

  /// Takes `bytes` from the smallest range that holds them. Side::top takes them from the end of the highest range
  /// that holds them, which separates long-lived allocations from short-lived ones. Empty if no range is large
  /// enough.
  std::optional<std::size_t> take(std::size_t bytes, Side side = Side::bottom) noexcept;

  /// Takes `bytes` at a multiple of `alignment`, from the smallest range that holds them there. Empty if none
  /// does.
  std::optional<std::size_t> take_aligned(std::size_t bytes, std::size_t alignment);

  /// Takes [offset, offset + bytes), which must be free.
  void take_at(std::size_t offset, std::size_t bytes);

  /// Whether all of [offset, offset + bytes) is free.
  bool contains(std::size_t offset, std::size_t bytes) const;

  /// Calls `visit` with offset and bytes of each range, the largest first, until it returns false.
  void visit_largest(const std::function<bool(std::size_t offset, std::size_t bytes)>& visit) const;

  std::size_t free_bytes() const { return free_bytes_; }
  /// The part of them in small ranges.
  std::size_t small_bytes() const { return small_bytes_; }
  std::size_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  std::size_t ranges() const { return by_offset_.size(); }

 private:
  void insert(std::size_t offset, std::size_t bytes, Entry entry) noexcept;
  Entry extract(std::map<std::size_t, std::size_t>::iterator range) noexcept;

  std::map<std::size_t, std::size_t> by_offset_;           // offset -> bytes
  std::set<std::pair<std::size_t, std::size_t>> by_size_;  // (bytes, offset)
  std::size_t small_;
  std::size_t free_bytes_ = 0, small_bytes_ = 0;
};

}  // namespace zeropage
