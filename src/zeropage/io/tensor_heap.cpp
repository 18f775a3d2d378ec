#include "zeropage/io/tensor_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

namespace zeropage {

namespace {

constexpr std::size_t kStep = 64 * kMiB;  // of making addresses writable: where memory is promised, this counts

}  // namespace

TensorHeap::TensorHeap(std::size_t addresses, Clock clock, std::size_t least)
    : clock_(std::move(clock)), least_(least), since_(clock_()) {
  const std::size_t span = round_up(addresses, kStep), mapped = span + kHugePageBytes + kBlockBytes;
  // Readable: kernels may read a few bytes beyond a tensor.
  void* raw = ::mmap(nullptr, mapped, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return;
  mapped_ = {static_cast<std::byte*>(raw), mapped};
  base_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::size_t>(raw), kHugePageBytes));
  ::madvise(base_, span, MADV_HUGEPAGE);
  span_ = span;
  resident_.assign(span / kHugePageBytes, false);
  free_.release(0, span);
}

TensorHeap::~TensorHeap() {
  if (!mapped_.empty()) ::munmap(mapped_.data(), mapped_.size());
}

std::byte* TensorHeap::try_allocate(std::size_t bytes) {
  if (bytes < least_ || bytes > span_ || is_forked()) return nullptr;
  bytes = round_up(bytes, kBlockBytes);
  std::map<std::size_t, Live> one;  // so that nothing is allocated once memory is taken
  one.emplace(0, Live{bytes, FreeList::make_entry()});
  auto live = one.extract(one.begin());
  const std::lock_guard lock(mutex_);
  const auto offset = free_.take(bytes);
  if (!offset) return nullptr;
  if (!make_writable(*offset + bytes)) {
    free_.release(*offset, bytes, std::move(live.mapped().entry));
    return nullptr;
  }
  live.key() = *offset;
  live_.insert(std::move(live));
  alive_bytes_ += bytes;
  if (note_peak()) give_back(limit());
  const std::size_t first = *offset / kHugePageBytes, end = ceil_div(*offset + bytes, kHugePageBytes);
  const auto in_memory = std::count(resident_.begin() + first, resident_.begin() + end, true);
  const std::size_t fresh = (end - first - in_memory) * kHugePageBytes;
  if (fresh > 0) give_back(limit() - std::min(limit(), fresh));
  std::fill(resident_.begin() + first, resident_.begin() + end, true);
  resident_bytes_ += fresh;
  return base_ + *offset;
}

bool TensorHeap::owns(const void* data) const noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  return base_ && at >= base_ && at < base_ + span_;
}

void TensorHeap::release(void* data) noexcept {
  if (is_forked()) return;  // a thread that the child lacks may hold the lock
  const std::lock_guard lock(mutex_);
  const std::size_t offset = static_cast<std::byte*>(data) - base_;
  auto live = live_.extract(offset);
  alive_bytes_ -= live.mapped().bytes;
  free_.release(offset, live.mapped().bytes, std::move(live.mapped().entry));
  if (note_peak() || !keeps_) give_back(limit());
}

void TensorHeap::trim() noexcept {
  if (is_forked()) return;
  const std::lock_guard lock(mutex_);
  give_back(0);
}

void TensorHeap::set_keeps(bool keeps) noexcept {
  if (is_forked()) return;
  const std::lock_guard lock(mutex_);
  keeps_ = keeps;
  if (!keeps_) give_back(limit());
}

std::size_t TensorHeap::alive_bytes() const {
  const std::lock_guard lock(mutex_);
  return alive_bytes_;
}

std::size_t TensorHeap::resident_bytes() const {
  const std::lock_guard lock(mutex_);
  return resident_bytes_;
}

bool TensorHeap::make_writable(std::size_t end) {
  if (end <= writable_) return true;
  const std::size_t bytes = round_up(end - writable_, kStep);
  if (::mprotect(base_ + writable_, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  writable_ += bytes;
  return true;
}

/// Bytes in memory up to which free ones stay.
std::size_t TensorHeap::limit() const { return keeps_ ? std::max(peak_, earlier_peak_) + kSlack : 0; }

/// Returns whether memory of an earlier peak may be free now.
bool TensorHeap::note_peak() {
  const auto now = clock_();
  const bool begins = now - since_ >= kLately;
  if (begins) {
    earlier_peak_ = std::exchange(peak_, 0);
    since_ = now;
  }
  peak_ = std::max(peak_, alive_bytes_);
  return begins;
}

/// Returns huge pages without a live block to the system, the largest holes first, until `most` bytes are in memory.
void TensorHeap::give_back(std::size_t most) noexcept {
  if (resident_bytes_ <= most) return;
  free_.visit_largest([&](std::size_t offset, std::size_t bytes) {
    if (bytes < kHugePageBytes) return false;
    const std::size_t end = std::min(offset + bytes, writable_) / kHugePageBytes;
    for (std::size_t page = ceil_div(offset, kHugePageBytes); page < end && resident_bytes_ > most; ++page) {
      if (!resident_[page]) continue;
      if (::madvise(base_ + page * kHugePageBytes, kHugePageBytes, MADV_DONTNEED) != 0) return false;
      resident_[page] = false;
      resident_bytes_ -= kHugePageBytes;
    }
    return resident_bytes_ > most;
  });
}

}  // namespace zeropage
