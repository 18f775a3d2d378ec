#include "zeropage/space/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>

#include "zeropage/base/process.h"
#include "zeropage/io/tensor_heap.h"

namespace zeropage {

namespace {

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1  // as GCC names it
#endif
#endif

#ifdef __SANITIZE_ADDRESS__
constexpr bool kUses = false;  // it finds reads and writes beyond malloc's blocks
#else
constexpr bool kUses = true;
#endif

/// Bytes of the machine's memory.
std::size_t physical_memory() {
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

/// Bytes of the smallest tensor that the heap makes. Tests of small programs set it lower.
std::size_t least_bytes() {
  const char* const set = std::getenv("ZEROPAGE_TENSOR_HEAP_LEAST");
  return set ? std::strtoull(set, nullptr, 10) : TensorHeap::kLeast;
}

class CpuAllocator final : public c10::Allocator {
 public:
  explicit CpuAllocator(c10::Allocator* ordinary) : ordinary_(ordinary) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    // The ordinary allocator raises PyTorch's error if no memory can hold the tensor.
    if (bytes < memory_ / 2) {
      if (void* const data = heap_.try_allocate(bytes)) {
        c10::profiledCPUMemoryReporter().New(data, bytes);
        return {data, data, &CpuAllocator::free, c10::kCPU};
      }
    }
    if (bytes >= TensorHeap::kLeast) heap_.trim();  // it may need the memory
    void* const data = ordinary_->raw_allocate(bytes);
    return {data, data, &CpuAllocator::free, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &CpuAllocator::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  c10::Allocator* ordinary() const { return ordinary_; }
  TensorHeap& heap() { return heap_; }

 private:
  static void free(void* data);

  c10::Allocator* const ordinary_;
  const std::size_t memory_ = physical_memory();
  TensorHeap heap_{4 * memory_, std::chrono::steady_clock::now, least_bytes()};
};

struct Installed {
  std::mutex mutex;
  CpuAllocator* allocator = nullptr;  // never destroyed: tensors may outlive all else
  int users = 0;
  const std::uint64_t process = process_generation();
  /// A thread that the child lacks may hold the mutex. The child leaves all as it is.
  bool is_forked() const { return process != process_generation(); }
};

Installed& installed() {
  static auto& one = *new Installed;
  return one;
}

void CpuAllocator::free(void* data) {
  CpuAllocator& self = *installed().allocator;
  if (!self.heap_.owns(data)) return self.ordinary_->raw_deallocate(data);
  c10::profiledCPUMemoryReporter().Delete(data);
  self.heap_.release(data);
}

void stop_using() {
  Installed& it = installed();
  if (it.is_forked()) return;
  const std::lock_guard lock(it.mutex);
  if (--it.users > 0) return;
  if (c10::GetAllocator(c10::kCPU) == it.allocator) c10::SetAllocator(c10::kCPU, it.allocator->ordinary());
  it.allocator->heap().set_keeps(false);
}

struct User {
  bool counts = false;
  ~User() {
    if (counts) stop_using();
  }
};

/// Null if no space on the CPU was ever open, or in a forked child.
TensorHeap* heap_if_any() {
  Installed& it = installed();
  if (it.is_forked()) return nullptr;
  const std::lock_guard lock(it.mutex);
  return it.allocator ? &it.allocator->heap() : nullptr;
}

}  // namespace

std::shared_ptr<void> use_tensor_heap() {
  Installed& it = installed();
  if (it.is_forked()) return nullptr;
  const auto user = std::make_shared<User>();
  const std::lock_guard lock(it.mutex);
  c10::Allocator* const now = c10::GetAllocator(c10::kCPU);
  if (!it.allocator) {
    if (!kUses || !now->raw_deleter()) return nullptr;
    it.allocator = new CpuAllocator(now);
  }
  if (now == it.allocator->ordinary()) c10::SetAllocator(c10::kCPU, it.allocator);
  it.allocator->heap().set_keeps(true);
  ++it.users;
  user->counts = true;
  return user;
}

void trim_tensor_heap() {
  if (TensorHeap* const heap = heap_if_any()) heap->trim();
}

std::size_t tensor_heap_bytes() {
  TensorHeap* const heap = heap_if_any();
  return heap ? heap->alive_bytes() : 0;
}

}  // namespace zeropage
