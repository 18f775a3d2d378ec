#include "zeropage/base/heap.h"

#ifdef __GLIBC__
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <limits>
#include <mutex>

#include "zeropage/base/units.h"
#endif

namespace zeropage {

#ifdef __GLIBC__
namespace {

/// The process's bytes in memory. 0 if unknown.
std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

/// Bytes of the heap's holes, in memory or not. The largest number if unknown.
std::size_t free_in_heap() {
#if __GLIBC_PREREQ(2, 33)
  return ::mallinfo2().fordblks;
#else
  return std::numeric_limits<std::size_t>::max();
#endif
}

}  // namespace

/// [Note: what malloc keeps] During forward and backward, freed activations and gradients of various sizes alternate
/// in malloc's heap. malloc keeps the holes, and the process grows by half of its activations although nothing is
/// alive. Paging should make the process smaller, so this returns the holes to the system. It does so only if the
/// process would otherwise exceed its largest size without holes by kMost, a part of the 64 MB that it may take
/// beyond budgets and activations: returned memory must be mapped again when it is touched.
void give_back_holes(std::size_t bytes) {
  constexpr std::size_t kBetween = 16 * kMiB, kLeast = 24 * kMiB, kMost = 48 * kMiB;
  static std::atomic<std::size_t> since = 0;
  static std::mutex mutex;
  static std::size_t highest = 0;
  if ((since += bytes) < kBetween) return;
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock) return;
  since = 0;
  const std::size_t resident = resident_bytes(), slack = std::clamp(highest / 16, kLeast, kMost);
  if (resident <= highest + slack) return;
  if (const std::size_t holes = free_in_heap(); holes < slack) {
    highest = resident - holes;
    return;
  }
  ::malloc_trim(0);
  highest = std::max(highest, resident_bytes());
}
#else
void give_back_holes(std::size_t) {}
#endif

}  // namespace zeropage
