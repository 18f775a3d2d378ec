#include "memory_shortage.h"

#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

namespace {

thread_local bool is_short = false;
constexpr long kNever = std::numeric_limits<long>::max();
std::atomic<long> before_failure = kNever;  // allocations

bool fails() {
  if (is_short) return true;
  if (before_failure.load(std::memory_order_relaxed) == kNever) return false;
  return before_failure.fetch_sub(1) == 0;
}

}  // namespace

zeropage::MemoryShortage::MemoryShortage() { is_short = true; }
zeropage::MemoryShortage::~MemoryShortage() { is_short = false; }

zeropage::FailingAllocation::FailingAllocation(std::size_t number) { before_failure = static_cast<long>(number); }
zeropage::FailingAllocation::~FailingAllocation() { before_failure = kNever; }
bool zeropage::FailingAllocation::has_failed() { return before_failure < 0; }

void* operator new(std::size_t bytes) {
  void* const memory = fails() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
