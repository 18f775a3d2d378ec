#include "zeropage/io/arena.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>

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

namespace {

constexpr std::size_t kSpread = 16;           // addresses for each byte of memory
constexpr std::size_t kMostUnits = 1U << 14;  // each may become a mapping of its own

}  // namespace

Arena::Arena(std::size_t capacity, SlabHook on_first_use)
    : capacity_(round_up(std::max(capacity, kHugePageBytes), kHugePageBytes)),
      span_(capacity_),
      unit_(std::max(std::bit_ceil(capacity_ / kMostUnits), kBlockBytes)),
      on_first_use_(std::move(on_first_use)),
      announced_(ceil_div(capacity_, kSlabBytes), false) {
  if (!on_first_use_) reserve(kSpread * capacity_);
  if (!base_) reserve(capacity_);
  if (!base_ || ::mprotect(base_, capacity_, PROT_READ | PROT_WRITE) != 0) {
    throw BudgetError(fmt::format("cannot map {} of memory ({}); lower device_memory or host_memory",
                                  format_bytes(capacity_), std::strerror(errno)));
  }
  // Advice: if the kernel has no huge pages, transfers are slower and nothing else changes.
  ::madvise(base_, capacity_, MADV_HUGEPAGE);
  ::madvise(base_, capacity_, MADV_DONTFORK);
  free_.release(0, capacity_);
  bare_.release(capacity_, span_ - capacity_);
  mappings_.emplace(0, capacity_);
}

Arena::Arena(std::span<std::byte> region)
    : base_(region.data()), capacity_(round_down(region.size(), kBlockBytes)), span_(capacity_), mapped_(false) {
  free_.release(0, capacity_);
}

Arena::~Arena() {
  if (!mapped_) return;
  for (const auto& [offset, bytes] : mappings_) ::munmap(base_ + offset, bytes);
  bare_.visit_largest([&](std::size_t offset, std::size_t bytes) { return ::munmap(base_ + offset, bytes) == 0; });
}

/// Addresses with nothing behind them. No base if they cannot be had.
void Arena::reserve(std::size_t span) {
  // One huge page more, and then the ends cut, so that the base is aligned.
  const std::size_t mapped = span + kHugePageBytes;
  void* raw = ::mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return;
  auto* start = static_cast<std::byte*>(raw);
  base_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::size_t>(start), kHugePageBytes));
  if (base_ != start) ::munmap(start, base_ - start);
  const std::size_t tail = start + mapped - (base_ + span);
  if (tail) ::munmap(base_ + span, tail);
  span_ = span;
}

std::optional<Block> Arena::try_allocate(std::size_t bytes, FreeList::Side side) {
  bytes = round_up(bytes, kBlockBytes);
  std::lock_guard lock(mutex_);
  auto offset = free_.take(bytes, side);
  if (!offset && join_holes(bytes)) offset = free_.take(bytes, side);
  if (!offset) return std::nullopt;
  announce(*offset, bytes);
  return Block(this, base_ + *offset, bytes);
}

/// [Note: no fragmentation] Makes a hole of at least `bytes`, of the fewest holes.
bool Arena::join_holes(std::size_t bytes) {
  if (!joins_holes()) return false;
  const std::size_t wanted = round_up(bytes, unit_);
  if (free_.free_bytes() < wanted) return false;
  std::vector<Range> holes;
  std::size_t found = 0;
  free_.visit_largest([&](std::size_t offset, std::size_t size) {
    const std::size_t begin = round_up(offset, unit_), end = round_down(offset + size, unit_);
    if (begin >= end) return size > unit_;
    holes.push_back({begin, std::min(end - begin, wanted - found)});
    found += holes.back().bytes;
    return found < wanted;
  });
  if (found < wanted) return false;
  const auto to = bare_.take(wanted);
  if (!to) return false;
  std::size_t moved = 0;
  for (const Range& hole : holes) {
    for (const Range& piece : mappings_in(hole)) {
      // Refused where the kernel has reached its most mappings: what has not moved stays where it is.
      if (!map_anew(piece, *to + moved)) {
        keep_addresses({*to + moved, wanted - moved});
        if (moved > 0) free_.release(*to, moved);
        return false;
      }
      free_.take_at(piece.offset, piece.bytes);
      keep_addresses(piece);
      moved += piece.bytes;
    }
  }
  free_.release(*to, moved);
  return true;
}

/// The mappings of which a range of memory consists, cut at its ends.
std::vector<Arena::Range> Arena::mappings_in(Range range) {
  const auto cut = [&](std::size_t at) {
    const auto mapping = std::prev(mappings_.upper_bound(at));
    const std::size_t before = at - mapping->first;
    if (before == 0 || before >= mapping->second) return;
    mappings_.emplace(at, mapping->second - before);
    mapping->second = before;
  };
  cut(range.offset);
  cut(range.offset + range.bytes);
  std::vector<Range> found;
  for (auto at = mappings_.lower_bound(range.offset); at != mappings_.end() && at->first < range.offset + range.bytes;
       ++at) {
    found.push_back({at->first, at->second});
  }
  return found;
}

bool Arena::map_anew(Range mapping, std::size_t to) {
  std::byte* const from = base_ + mapping.offset;
  void* const moved = ::mremap(from, mapping.bytes, mapping.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, base_ + to);
  if (moved == MAP_FAILED) return false;
  mappings_.erase(mapping.offset);
  mappings_.emplace(to, mapping.bytes);
  return true;
}

/// Addresses that memory has left are free for other memory to come; if another thread's mapping was quicker, they
/// are lost to us.
void Arena::keep_addresses(Range range) {
  constexpr int kHow = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void* const wanted = base_ + range.offset;
  void* const got = ::mmap(wanted, range.bytes, PROT_NONE, kHow, -1, 0);
  if (got == wanted) return bare_.release(range.offset, range.bytes);
  if (got != MAP_FAILED) ::munmap(got, range.bytes);  // a kernel that takes the address for a wish
}

void Arena::give_back(std::byte* data, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  free_.release(data - base_, bytes);
}

void Arena::announce(std::size_t offset, std::size_t bytes) {
  if (!on_first_use_) return;
  for (std::size_t slab = offset / kSlabBytes; slab * kSlabBytes < offset + bytes; ++slab) {
    if (announced_[slab]) continue;
    announced_[slab] = true;
    const std::size_t begin = slab * kSlabBytes;
    on_first_use_({base_ + begin, std::min(kSlabBytes, capacity_ - begin)});
  }
}

}  // namespace zeropage
