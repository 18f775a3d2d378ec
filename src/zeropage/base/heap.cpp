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

/// The process's bytes in memory. 0 if unknown.
std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

/// [Note: what malloc keeps] During forward and backward, freed activations and gradients of various sizes alternate
/// in malloc's heap. malloc keeps the holes, and the process grows by half of its activations although nothing is
/// alive. Paging should make the process smaller, so this returns the holes to the system. It does so only if the
/// process would otherwise exceed its largest size without holes, because returned memory must be mapped again.
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
