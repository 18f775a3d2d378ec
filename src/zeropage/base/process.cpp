#include "zeropage/base/process.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>

namespace zeropage {
namespace {

std::atomic<std::uint64_t> generation{0};
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

std::atomic<std::uint64_t> threads{0};
thread_local const std::uint64_t thread_number = 1 + threads.fetch_add(1, std::memory_order_relaxed);

}  // namespace

std::uint64_t process_generation() noexcept { return generation.load(std::memory_order_relaxed); }

std::uint64_t this_thread_number() noexcept { return thread_number; }

bool defines_first(const char* symbol) noexcept {
  static const char here = 0;
  Dl_info first, own;
  const void* const found = ::dlsym(RTLD_DEFAULT, symbol);
  return found && ::dladdr(found, &first) != 0 && ::dladdr(&here, &own) != 0 && first.dli_fbase == own.dli_fbase;
}

}  // namespace zeropage
