#include "zeropage/io/arena.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {

Block& Block::operator=(Block&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Block::~Block() {
  if (data_) arena_->give_back(data_, bytes_);
}

Arena::Arena(std::size_t capacity, SlabHook on_first_use)
    : capacity_(round_up(std::max(capacity, kHugePageBytes), kHugePageBytes)),
      on_first_use_(std::move(on_first_use)),
      announced_(ceil_div(capacity_, kSlabBytes), false) {
  // Map one huge page more, then cut the ends, so that the base is aligned.
  const std::size_t mapped = capacity_ + kHugePageBytes;
  void* raw = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    throw BudgetError(fmt::format("cannot map {} of memory ({}); lower device_memory or host_memory",
                                  format_bytes(capacity_), std::strerror(errno)));
  }
  auto* start = static_cast<std::byte*>(raw);
  base_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::size_t>(start), kHugePageBytes));
  if (base_ != start) ::munmap(start, base_ - start);
  const std::size_t tail = start + mapped - (base_ + capacity_);
  if (tail) ::munmap(base_ + capacity_, tail);
  // Advice: if the kernel has no huge pages, transfers are slower and nothing else changes.
  ::madvise(base_, capacity_, MADV_HUGEPAGE);
  ::madvise(base_, capacity_, MADV_DONTFORK);
  free_.release(0, capacity_);
}

Arena::Arena(std::span<std::byte> region)
    : base_(region.data()), capacity_(round_down(region.size(), kBlockBytes)), mapped_(false) {
  free_.release(0, capacity_);
}

Arena::~Arena() {
  if (mapped_) ::munmap(base_, capacity_);
}

std::optional<Block> Arena::try_allocate(std::size_t bytes, FreeList::Side side) {
  bytes = round_up(bytes, kBlockBytes);
  std::lock_guard lock(mutex_);
  const auto offset = free_.take(bytes, side);
  if (!offset) return std::nullopt;
  if (mapped_) announce(*offset, bytes);
  return Block(this, base_ + *offset, bytes);
}

void Arena::slide(Block& block, std::byte* to) {
  std::lock_guard lock(mutex_);
  free_.release(block.data_ - base_, block.bytes_);
  free_.take_at(to - base_, block.bytes_);
  std::memmove(to, block.data_, block.bytes_);
  block.data_ = to;
}

void Arena::give_back(std::byte* data, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  free_.release(data - base_, bytes);
}

void Arena::announce(std::size_t offset, std::size_t bytes) {
  for (std::size_t slab = offset / kSlabBytes; slab * kSlabBytes < offset + bytes; ++slab) {
    if (announced_[slab]) continue;
    announced_[slab] = true;
    const std::size_t begin = slab * kSlabBytes;
    if (on_first_use_) on_first_use_({base_ + begin, std::min(kSlabBytes, capacity_ - begin)});
  }
}

}  // namespace zeropage
