// Ends the C++ heap for a thread, behind operator new.
#pragma once

namespace zeropage {

/// While it lives, what this thread asks of the heap throws std::bad_alloc.
class MemoryShortage {
 public:
  MemoryShortage();
  ~MemoryShortage();
  MemoryShortage(const MemoryShortage&) = delete;
  MemoryShortage& operator=(const MemoryShortage&) = delete;
};

}  // namespace zeropage
