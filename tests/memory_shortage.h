// Ends the C++ heap, behind operator new.
#pragma once

#include <cstddef>

namespace zeropage {

/// While it lives, what this thread asks of the heap throws std::bad_alloc.
class MemoryShortage {
 public:
  MemoryShortage();
  ~MemoryShortage();
  MemoryShortage(const MemoryShortage&) = delete;
  MemoryShortage& operator=(const MemoryShortage&) = delete;
};

/// While it lives, one allocation throws std::bad_alloc: the one after `number` others, of all threads.
class FailingAllocation {
 public:
  explicit FailingAllocation(std::size_t number);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;
  /// Whether it has failed.
  static bool has_failed();
};

}  // namespace zeropage
