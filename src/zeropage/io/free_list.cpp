#include "zeropage/io/free_list.h"

#include <iterator>

#include "zeropage/base/units.h"

namespace zeropage {

FreeList::Entry FreeList::make_entry() {
  std::map<std::size_t, std::size_t> by_offset;
  std::set<std::pair<std::size_t, std::size_t>> by_size;
  by_offset.emplace(0, 0);
  by_size.emplace(0, 0);
  return {by_offset.extract(by_offset.begin()), by_size.extract(by_size.begin())};
}

void FreeList::insert(std::size_t offset, std::size_t bytes, Entry entry) noexcept {
  entry.by_offset.key() = offset;
  entry.by_offset.mapped() = bytes;
  entry.by_size.value() = {bytes, offset};
  by_offset_.insert(std::move(entry.by_offset));
  by_size_.insert(std::move(entry.by_size));
  free_bytes_ += bytes;
  if (bytes < small_) small_bytes_ += bytes;
}

FreeList::Entry FreeList::extract(std::map<std::size_t, std::size_t>::iterator range) noexcept {
  free_bytes_ -= range->second;
  if (range->second < small_) small_bytes_ -= range->second;
  auto by_size = by_size_.extract({range->second, range->first});
  return {by_offset_.extract(range), std::move(by_size)};
}

void FreeList::release(std::size_t offset, std::size_t bytes, Entry entry) noexcept {
  if (bytes == 0) return;
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.end() && next->first == offset + bytes) {
    bytes += next->second;
    (void)extract(next++);
  }
  if (next != by_offset_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      (void)extract(previous);
    }
  }
  insert(offset, bytes, std::move(entry));
}

std::optional<std::size_t> FreeList::take(std::size_t bytes, Side side) noexcept {
  if (bytes == 0 || largest() < bytes) return std::nullopt;
  auto range = by_offset_.end();
  if (side == Side::bottom) {
    range = by_offset_.find(by_size_.lower_bound({bytes, 0})->second);
  } else {
    do --range;
    while (range->second < bytes);
  }
  const auto [offset, size] = *range;
  Entry rest = extract(range);
  if (side == Side::bottom) {
    if (size > bytes) insert(offset + bytes, size - bytes, std::move(rest));
    return offset;
  }
  if (size > bytes) insert(offset, size - bytes, std::move(rest));
  return offset + size - bytes;
}

std::optional<std::size_t> FreeList::take_aligned(std::size_t bytes, std::size_t alignment) {
  for (auto range = by_size_.lower_bound({bytes, 0}); range != by_size_.end(); ++range) {
    const auto [size, begin] = *range;
    const std::size_t offset = round_up(begin, alignment);
    if (offset + bytes > begin + size) continue;
    take_at(offset, bytes);
    return offset;
  }
  return std::nullopt;
}

bool FreeList::contains(std::size_t offset, std::size_t bytes) const {
  const auto next = by_offset_.upper_bound(offset);
  if (bytes == 0) return true;
  if (next == by_offset_.begin()) return false;
  const auto& [begin, size] = *std::prev(next);
  return offset + bytes <= begin + size;
}

void FreeList::visit_largest(const std::function<bool(std::size_t, std::size_t)>& visit) const {
  for (auto range = by_size_.rbegin(); range != by_size_.rend() && visit(range->second, range->first); ++range) {
  }
}

void FreeList::take_at(std::size_t offset, std::size_t bytes) {
  const auto range = std::prev(by_offset_.upper_bound(offset));
  const auto [begin, length] = *range;
  Entry rest = make_entry();
  Entry first = extract(range);
  if (offset > begin) insert(begin, offset - begin, std::move(first));
  if (begin + length > offset + bytes) insert(offset + bytes, begin + length - offset - bytes, std::move(rest));
}

}  // namespace zeropage
