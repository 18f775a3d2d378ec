#include "zeropage/base/heap.h"

#include <doctest/doctest.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "forked_child.h"
#include "zeropage/base/units.h"

using namespace zeropage;

// Sanitizers have a heap of their own.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {

long page_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

constexpr std::size_t kLive = 16 * kMiB;

std::vector<void*> allocate(std::size_t bytes) {
  std::vector<void*> blocks;
  for (std::size_t total = 0; total < kLive; total += bytes) blocks.push_back(std::malloc(bytes));
  return blocks;
}

/// For each size, fills blocks of 16 MiB and frees them. They are in holes of just this size, which cannot merge.
/// Returns the largest size of the process.
std::size_t step(std::size_t sizes) {
  std::size_t largest = 0;
  for (std::size_t i = 1; i <= sizes; ++i) {
    const auto blocks = allocate(i * kMiB);
    for (void* const block : blocks) std::memset(block, 1, i * kMiB);
    largest = std::max(largest, resident_bytes());
    for (void* const block : blocks) {
      std::free(block);
      give_back_holes(i * kMiB);
    }
  }
  return largest;
}

/// Runs `body` in a process whose heap has such holes.
int with_holes(std::size_t sizes, int (*body)()) {
  return in_forked_child([=] {
    ::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
    ::mallopt(M_MMAP_THRESHOLD, 32 << 20);  // smaller blocks are in the heap
    std::vector<void*> blocks, stay;
    for (std::size_t i = 1; i <= sizes; ++i) {
      for (std::size_t total = 0; total < kLive; total += i * kMiB) {
        blocks.push_back(std::malloc(i * kMiB));
        stay.push_back(std::malloc(10'000));
      }
    }
    for (void* const block : blocks) std::free(block);
    return stay.empty() ? -1 : body();
  });
}

}  // namespace

TEST_CASE("few holes that each step touches again stay in memory") {
  CHECK(with_holes(1, [] {
          for (int i = 0; i < 8; ++i) step(1);
          const long before = page_faults();
          for (int i = 0; i < 4; ++i) step(1);
          return page_faults() - before < 4000 ? 0 : 1;
        }) == 0);
}

TEST_CASE("a process with many holes does not grow by all of them") {
  CHECK(with_holes(12, [] {
          std::size_t largest = 0;
          for (int i = 0; i < 4; ++i) largest = std::max(largest, step(12));
          return largest < 110 * kMiB ? 0 : 1;  // all holes are 192
        }) == 0);
}
#endif
