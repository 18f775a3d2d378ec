#include "memory_shortage.h"

#include <cstdlib>
#include <new>

namespace {

thread_local bool is_short = false;

}  // namespace

zeropage::MemoryShortage::MemoryShortage() { is_short = true; }
zeropage::MemoryShortage::~MemoryShortage() { is_short = false; }

void* operator new(std::size_t bytes) {
  void* const memory = is_short ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
