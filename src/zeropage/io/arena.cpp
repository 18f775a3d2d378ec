#include "zeropage/io/arena.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {

Block& Block::operator=(Block&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(entry_, other.entry_);
  return *this;
}

Block::~Block() {
  if (data_) arena_->give_back(data_, bytes_, std::move(entry_));
}

namespace {

/// [Note: bare addresses] They read as zeros. Kernels may read a few bytes beyond a tensor, as PyTorch's fused SGD
/// does in bfloat16, and a tensor may end where memory does. A block of bare addresses follows the arena.
constexpr int kBareProtection = PROT_READ;
constexpr std::size_t kBehind = kBlockBytes;

constexpr std::size_t kSpread = 16;  // addresses per byte of memory
constexpr std::size_t kMostUnits = 1U << 14;
constexpr std::size_t kMostMappings = 1U << 13;  // of memory; as many of bare addresses; a process has few arenas
constexpr std::size_t kFewHugePages = 32;        // an arena with fewer does without
constexpr std::size_t kWorthMoving = 64 * kKiB;  // a piece; to clear less memory is faster

std::size_t unit_for(std::size_t capacity) {
  return std::clamp(std::bit_ceil(capacity / kMostUnits), kBlockBytes, kHugePageBytes);
}

std::size_t page_for(std::size_t capacity) {
  return capacity >= kFewHugePages * kHugePageBytes ? kHugePageBytes : unit_for(capacity);
}

/// Kernels before 5.7 cannot do this.
bool may_map_anew() {
  static const bool may = [] {
    constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
    void* const two = ::mmap(nullptr, 2 * kBlockBytes, kProtection, kFlags, -1, 0);
    if (two == MAP_FAILED) return false;
    void* const second = static_cast<std::byte*>(two) + kBlockBytes;
    constexpr int kHow = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    const bool done = ::mremap(two, kBlockBytes, kBlockBytes, kHow, second) != MAP_FAILED;
    ::munmap(two, 2 * kBlockBytes);
    return done;
  }();
  return may;
}

}  // namespace

Arena::Arena(std::size_t capacity, SlabHook on_first_use)
    : capacity_(round_up(std::max(capacity, kHugePageBytes), kHugePageBytes)),
      span_(capacity_),
      unit_(unit_for(capacity_)),
      page_(page_for(capacity_)),
      protection_(PROT_READ | PROT_WRITE),
      on_first_use_(std::move(on_first_use)),
      announced_(ceil_div(capacity_, kSlabBytes), false) {
  reserve_for(/*joins=*/!on_first_use_);
  if (!base_ || !map({0, capacity_}, protection_)) {
    const int error = errno;
    if (base_) ::munmap(base_, span_ + kBehind);
    throw BudgetError(fmt::format("cannot map {} of memory ({}); lower device_memory or host_memory",
                                  format_bytes(capacity_), std::strerror(error)));
  }
}

Arena::Arena(std::size_t capacity, Hollow)
    : capacity_(round_up(std::max(capacity, kHugePageBytes), kHugePageBytes)),
      span_(capacity_),
      unit_(unit_for(capacity_)),
      page_(page_for(capacity_)),
      protection_(PROT_NONE) {
  reserve_for(/*joins=*/true);
  if (!base_) throw BudgetError(fmt::format("cannot have {} of addresses to plan with", format_bytes(capacity_)));
}

std::unique_ptr<Arena> Arena::make_hollow(std::size_t capacity) {
  return std::unique_ptr<Arena>(new Arena(capacity, Hollow{}));
}

Arena::Arena(std::span<std::byte> region)
    : base_(region.data()), capacity_(round_down(region.size(), kBlockBytes)), span_(capacity_), mapped_(false) {
  free_.release(0, capacity_);
}

Arena::~Arena() {
  // A forked child may have mapped memory of its own at the region's addresses.
  if (!mapped_ || is_forked()) return;
  for (const auto& [offset, bytes] : mappings_) ::munmap(base_ + offset, bytes);
  bare_.visit_largest([&](std::size_t offset, std::size_t bytes) { return ::munmap(base_ + offset, bytes) == 0; });
  ::munmap(base_ + span_, kBehind);
}

/// Reserves the arena's addresses: free memory, and the bare ones that joining holes needs.
void Arena::reserve_for(bool joins) {
  if (joins && may_map_anew()) reserve(kSpread * capacity_);
  if (!base_) reserve(capacity_);
  if (!base_) return;
  free_.release(0, capacity_);
  bare_.release(capacity_, span_ - capacity_);
  mappings_.emplace(0, capacity_);
}

/// Reserves addresses without memory, and a block behind them. Leaves base_ null if that fails. [Note: bare
/// addresses]
void Arena::reserve(std::size_t span) {
  // Reserves one huge page more, then cuts both ends to align the base.
  const std::size_t mapped = span + kHugePageBytes + kBehind;
  void* raw = ::mmap(nullptr, mapped, kBareProtection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return;
  auto* start = static_cast<std::byte*>(raw);
  base_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::size_t>(start), kHugePageBytes));
  if (base_ != start) ::munmap(start, base_ - start);
  const std::size_t tail = start + mapped - (base_ + span + kBehind);
  if (tail) ::munmap(base_ + span + kBehind, tail);
  span_ = span;
}

std::optional<Block> Arena::try_allocate(std::size_t bytes, FreeList::Side side, bool must) {
  if (is_forked()) {
    throw AccessError("an arena's memory belongs to the process that made it: a forked child makes one of its own");
  }
  bytes = round_up(bytes, kBlockBytes);
  FreeList::Entry entry = FreeList::make_entry();
  std::lock_guard lock(mutex_);
  const bool aligns = keeps_pages_whole() && !must && side == FreeList::Side::bottom && bytes > page_ / 2;
  auto offset = take(bytes, side, aligns);
  if (!offset && keeps_pages_whole()) {
    bool joined = join_holes(bytes, page_);
    while (!joined && has_cut_ && join_loose()) joined = join_holes(bytes, page_);
    if (joined) offset = take(bytes, side, aligns);
  }
  const bool may_cut = must || !keeps_pages_whole() || free_.free_bytes() >= bytes + capacity_ / 2;
  if (!offset && may_cut && join_holes(bytes, unit_)) offset = take(bytes, side, aligns);
  if (!offset) return std::nullopt;
  announce(*offset, bytes);
  return Block(this, base_ + *offset, bytes, std::move(entry));
}

/// [Note: huge pages stay whole]
std::optional<std::size_t> Arena::take(std::size_t bytes, FreeList::Side side, bool aligns) {
  if (aligns) {
    if (const auto aligned = free_.take_aligned(bytes, page_)) {
      if (has_cut_) make_whole({*aligned, bytes});
      return aligned;
    }
  }
  return free_.take(bytes, side);
}

std::size_t Arena::useless_to(std::size_t bytes) const {
  if (!keeps_pages_whole() || bytes <= page_ / 2) return 0;
  const std::lock_guard lock(mutex_);
  return free_.small_bytes();
}

/// Replaces the cut huge pages in free memory. Without, transfers are slower and nothing else changes.
void Arena::make_whole(Range free) noexcept try {
  for (std::size_t at = free.offset; at + page_ <= free.offset + free.bytes; at += page_) {
    const auto next = mappings_.upper_bound(at);
    if (next == mappings_.end() || next->first >= at + page_) continue;
    const auto pieces = mappings_in({at, page_});
    if (!map({at, page_}, protection_)) return;
    for (const Range& piece : pieces) {
      if (piece.offset != at) mappings_.erase(piece.offset);
    }
    mappings_.find(at)->second = page_;
  }
} catch (const std::bad_alloc&) {
}

/// [Note: no fragmentation] Makes a hole of at least `bytes` from the fewest holes.
bool Arena::join_holes(std::size_t bytes, std::size_t unit) {
  if (!joins_holes()) return false;
  const std::size_t wanted = round_up(bytes, unit);
  if (free_.free_bytes() < wanted) return false;
  std::vector<Range> holes;
  std::size_t found = 0;
  free_.visit_largest([&](std::size_t offset, std::size_t size) {
    const std::size_t begin = round_up(offset, unit), end = round_down(offset + size, unit);
    if (begin >= end) return size >= unit;
    holes.push_back({begin, std::min(end - begin, wanted - found)});
    found += holes.back().bytes;
    return found < wanted;
  });
  if (found < wanted) return false;
  has_cut_ = has_cut_ || unit < page_;
  // Aligned, so that new memory is on huge pages.
  const auto to = bare_.take_aligned(wanted, page_);
  if (!to) return false;
  const bool moves = wanted / holes.size() >= kWorthMoving && mappings_.size() + holes.size() <= kMostMappings;
  const std::size_t joined = moves ? move(holes, unit, {*to, wanted}) : replace(holes, {*to, wanted});
  if (joined > 0) free_.release(*to, joined);
  return joined == wanted;
}

/// Makes a huge page in place of pieces that were cut from others, if those have no other memory.
bool Arena::join_loose() {
  std::vector<Range> pieces;
  std::size_t found = 0;
  free_.visit_largest([&](std::size_t offset, std::size_t size) {
    const std::size_t begin = round_up(offset, unit_), end = round_down(offset + size, unit_);
    if (begin >= end) return size >= unit_;
    const std::size_t first = round_down(offset, page_), last = round_up(offset + size, page_);
    const bool has_whole_page = round_up(offset, page_) + page_ <= offset + size;
    const bool is_loose = !has_whole_page && bare_.contains(first, offset - first) &&
                          bare_.contains(offset + size, last - offset - size);
    if (!is_loose) return true;
    pieces.push_back({begin, std::min(end - begin, page_ - found)});
    found += pieces.back().bytes;
    return found < page_;
  });
  if (found < page_) return false;
  const auto to = bare_.take_aligned(page_, page_);
  if (!to) return false;
  const std::size_t joined = replace(pieces, {*to, page_});
  if (joined > 0) free_.release(*to, joined);
  return joined == page_;
}

/// Returns the bytes that are at `to` then. They are fewer than the holes' if the kernel refuses.
std::size_t Arena::move(const std::vector<Range>& holes, std::size_t unit, Range to) {
  std::size_t moved = 0;
  for (const Range& hole : holes) {
    for (const Range& piece : pieces_of(hole, unit)) {
      const std::size_t after = moved + piece.bytes;
      if (mappings_.find(piece.offset)->second != piece.bytes) {  // was cut before
        moved += replace({piece}, {to.offset + moved, piece.bytes});
      } else if (map_anew(piece, to.offset + moved)) {
        free_.take_at(piece.offset, piece.bytes);
        bare_.release(piece.offset, piece.bytes);
        moved = after;
      }
      if (moved == after) continue;
      // The kernel refuses at its limit of mappings. Pieces that were not moved stay in place. The kernel may or may
      // not have released the new addresses of a piece that map_anew() moves: give them up.
      if (after < to.bytes) bare_.release(to.offset + after, to.bytes - after);
      return moved;
    }
  }
  return moved;
}

/// The parts of a hole that move as they are: each one mapping. A unit that was cut before is a part of several.
std::vector<Arena::Range> Arena::pieces_of(Range hole, std::size_t unit) {
  std::vector<Range> pieces;
  cut_mapping(hole.offset);
  cut_mapping(hole.offset + hole.bytes);
  for (std::size_t at = hole.offset; at < hole.offset + hole.bytes; at += pieces.back().bytes) {
    const auto mapping = mappings_.find(at);
    if (mapping != mappings_.end() && mapping->second >= unit) {
      pieces.push_back({at, round_down(mapping->second, unit)});
    } else {
      pieces.push_back({at, unit});
    }
    cut_mapping(at + pieces.back().bytes);
  }
  return pieces;
}

/// The same with new memory, in one mapping.
std::size_t Arena::replace(const std::vector<Range>& holes, Range to) {
  if (!map(to, protection_)) return 0;
  std::size_t replaced = 0;
  for (const Range& hole : holes) {
    if (!map(hole, kBareProtection)) break;
    for (const Range& piece : mappings_in(hole)) mappings_.erase(piece.offset);
    free_.take_at(hole.offset, hole.bytes);
    bare_.release(hole.offset, hole.bytes);
    replaced += hole.bytes;
  }
  if (replaced > 0) mappings_.emplace(to.offset, replaced);
  const Range rest{to.offset + replaced, to.bytes - replaced};
  if (rest.bytes > 0 && map(rest, kBareProtection)) bare_.release(rest.offset, rest.bytes);
  return replaced;
}

/// Maps memory without content, or bare addresses, in place of what is there.
bool Arena::map(Range range, int protection) {
  constexpr int kHow = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  std::byte* const at = base_ + range.offset;
  if (::mmap(at, range.bytes, protection, kHow, -1, 0) == MAP_FAILED) return false;
  if (!(protection & PROT_WRITE)) return true;
  // Advice only: without huge pages, transfers are slower and nothing else changes.
  for (const int advice : {MADV_HUGEPAGE, MADV_DONTFORK, MADV_DONTDUMP}) ::madvise(at, range.bytes, advice);
  return true;
}

/// Divides the mapping at an address of memory, so that one begins there.
void Arena::cut_mapping(std::size_t at) {
  const auto mapping = std::prev(mappings_.upper_bound(at));
  const std::size_t before = at - mapping->first;
  if (before == 0 || before >= mapping->second) return;
  mappings_.emplace(at, mapping->second - before);
  mapping->second = before;
}

/// The mappings in a range of memory, cut at its ends.
std::vector<Arena::Range> Arena::mappings_in(Range range) {
  cut_mapping(range.offset);
  cut_mapping(range.offset + range.bytes);
  std::vector<Range> found;
  for (auto at = mappings_.lower_bound(range.offset); at != mappings_.end() && at->first < range.offset + range.bytes;
       ++at) {
    found.push_back({at->first, at->second});
  }
  return found;
}

bool Arena::map_anew(Range mapping, std::size_t to) {
  std::byte* const from = base_ + mapping.offset;
  // The old addresses stay reserved, so no other thread's mapping can take them.
  constexpr int kHow = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  if (::mremap(from, mapping.bytes, mapping.bytes, kHow, base_ + to) == MAP_FAILED) return false;
  (void)map(mapping, kBareProtection);  // a failure is harmless: they have no memory anyway
  auto node = mappings_.extract(mapping.offset);
  node.key() = to;
  mappings_.insert(std::move(node));
  return true;
}

void Arena::give_back(std::byte* data, std::size_t bytes, FreeList::Entry entry) noexcept {
  if (is_forked()) return;  // a thread that the child lacks may hold the lock
  std::lock_guard lock(mutex_);
  free_.release(data - base_, bytes, std::move(entry));
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
