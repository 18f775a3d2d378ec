// Memory on huge pages for large ordinary tensors on the CPU: activations, gradients before they are paged, and
// results of operators.
//
// [Note: what malloc keeps] During forward and backward, freed tensors of various sizes alternate. malloc keeps the
// holes in its heap, so the process grows by half of its activations although nothing is alive. Or it returns them
// to the system, and each step faults them in again, 4 KiB at a time: 180,000 faults a step of a model with 125
// million parameters. Here the kernel provides 2 MiB at a fault. Free memory stays, so long as all memory is at most
// kSlack more than the most bytes alive lately: in the last 10 to 20 seconds, as seen when a block is made or freed.
// New memory beyond that first returns as much from holes, in whole huge pages: a live block keeps those that it
// touches.
//
// A forked child keeps the tensors that it inherits. It makes no new ones here.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "zeropage/base/process.h"
#include "zeropage/base/units.h"
#include "zeropage/io/free_list.h"

namespace zeropage {

class TensorHeap {
 public:
  using Clock = std::function<std::chrono::steady_clock::time_point()>;
  static constexpr std::size_t kLeast = 256 * kKiB;  // a block; smaller ones are malloc's
  static constexpr std::size_t kSlack = 32 * kMiB;   // half of what the process may take beyond budgets
  static constexpr std::chrono::seconds kLately{10};

  /// `addresses`: bytes that blocks share. Without so much address space, try_allocate() returns null. `least` and
  /// `clock`: for tests.
  explicit TensorHeap(std::size_t addresses, Clock clock = std::chrono::steady_clock::now,
                      std::size_t least = kLeast);
  ~TensorHeap();
  TensorHeap(const TensorHeap&) = delete;
  TensorHeap& operator=(const TensorHeap&) = delete;

  /// A block of at least `bytes`, aligned to 4 KiB, of any content. Null if bytes < least, if no range of addresses
  /// is large enough, or in a forked child.
  [[nodiscard]] std::byte* try_allocate(std::size_t bytes);
  /// Whether try_allocate() returned `data`.
  bool owns(const void* data) const noexcept;
  /// Frees a block. Does nothing in a forked child.
  void release(void* data) noexcept;
  /// Whether free memory stays for later blocks. If not, it returns to the system when a block is freed. At first it
  /// stays. Does nothing in a forked child.
  void set_keeps(bool keeps) noexcept;
  /// Returns all free memory to the system now: all huge pages that no live block touches. Does nothing in a forked
  /// child.
  void trim() noexcept;

  std::size_t alive_bytes() const;
  /// In memory, alive or free: whole huge pages.
  std::size_t resident_bytes() const;

 private:
  struct Live {
    std::size_t bytes;
    FreeList::Entry entry;  // makes freeing it allocate nothing
  };
  bool make_writable(std::size_t end);
  std::size_t limit() const;
  bool is_forked() const { return process_ != process_generation(); }
  bool note_peak();
  void give_back(std::size_t most) noexcept;

  mutable std::mutex mutex_;
  const Clock clock_;
  const std::size_t least_;
  std::span<std::byte> mapped_;
  std::byte* base_ = nullptr;
  std::size_t span_ = 0, writable_ = 0;
  FreeList free_;
  std::map<std::size_t, Live> live_;  // by offset
  std::vector<bool> resident_;        // by huge page
  std::size_t alive_bytes_ = 0, resident_bytes_ = 0;
  std::size_t peak_ = 0, earlier_peak_ = 0;  // of alive_bytes_, in this and in the previous span of kLately
  std::chrono::steady_clock::time_point since_;
  bool keeps_ = true;
  const std::uint64_t process_ = process_generation();
};

}  // namespace zeropage
