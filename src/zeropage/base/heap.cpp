#include "zeropage/base/heap.h"

#ifdef __GLIBC__
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <mutex>

#include "zeropage/base/units.h"
#endif

namespace zeropage {

#ifdef __GLIBC__
namespace {

/// Of this process, all it has in memory. 0 if it is not told.
std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

/// [Note: what malloc keeps] During forward and backward, freed activations and gradients of other sizes take turns
/// in malloc's heap. It keeps the holes, and the process grows by half of its activations although nothing is alive.
/// Paging is meant to make the process smaller, so the holes are given back to the system; but only where the process
/// would else be larger than it ever was without holes, for memory given back must be had again.
void give_back_holes(std::size_t bytes) {
  constexpr std::size_t kBetween = 4 * kMiB, kSlack = 24 * kMiB;
  static std::mutex mutex;
  static std::size_t since = 0, highest = 0;
  std::lock_guard lock(mutex);
  since += bytes;
  if (since < kBetween) return;
  since = 0;
  if (resident_bytes() <= highest + std::max(kSlack, highest / 16)) return;
  ::malloc_trim(0);
  highest = std::max(highest, resident_bytes());
}
#else
void give_back_holes(std::size_t) {}
#endif

}  // namespace zeropage
