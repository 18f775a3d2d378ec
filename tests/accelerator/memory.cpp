#include <ATen/core/CachingHostAllocator.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "device.h"

namespace sim {
namespace {

constexpr std::size_t kBlock = 512;

std::size_t memory_bytes() {
  const char* said = std::getenv("SIM_MEMORY_MB");
  return (said ? std::strtoull(said, nullptr, 10) : 6144) << 20;
}

/// Blocks of device memory. One that was freed serves its own stream again at once, as torch's allocators do; others
/// get it when the streams that used it have come so far.
class Memory {
 public:
  Memory() : bytes_(memory_bytes()) {
    const int file = ::memfd_create("sim", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes_)) == 0, "sim: no memory for the device");
    base_ = static_cast<char*>(::mmap(nullptr, bytes_, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    shadow_ =
        static_cast<char*>(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(base_ != MAP_FAILED && shadow_ != MAP_FAILED, "sim: no addresses for the device");
    ::close(file);
    free_[0] = bytes_;
  }

  bool holds(const void* at) const { return at >= base_ && at < base_ + bytes_; }
  void* shadow(const void* at) const { return shadow_ + (static_cast<const char*>(at) - base_); }
  std::pair<std::size_t, std::size_t> info() {
    std::lock_guard lock(mutex_);
    return {bytes_ - used_, bytes_};
  }
  c10::CachingDeviceAllocator::DeviceStats stats() {
    std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* sum : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*sum)[0].current = static_cast<std::int64_t>(used_);
      (*sum)[0].peak = static_cast<std::int64_t>(peak_);
    }
    return stats;
  }
  void reset_peak() {
    std::lock_guard lock(mutex_);
    peak_ = used_;
  }

  void* allocate(std::size_t asked) {
    if (asked == 0) return nullptr;
    const std::size_t bytes = (asked + kBlock - 1) / kBlock * kBlock;
    std::unique_lock lock(mutex_);
    Queue& queue = current_queue();
    auto& own = freed_[queue.id()][bytes];
    std::size_t at;
    if (!own.empty()) {
      at = own.back();
      own.pop_back();
    } else if (!take(bytes, at)) {
      lock.unlock();
      give_back();
      lock.lock();
      if (!take(bytes, at)) {
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim: out of memory: ", bytes, " bytes asked, ", used_, " of ",
                         bytes_, " in use");
      }
    }
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    blocks_[at] = {bytes, &queue, {}};
    return base_ + at;
  }

  void free(void* pointer) {
    if (is_forked()) return;
    std::lock_guard lock(mutex_);
    const std::size_t at = static_cast<char*>(pointer) - base_;
    const auto found = blocks_.find(at);
    if (found == blocks_.end()) return;
    const Block block = std::move(found->second);
    blocks_.erase(found);
    used_ -= block.bytes;
    for (Queue* other : block.used_by) {
      block.owner->push([other, position = other->asked()] { other->wait(position); });
    }
    // Poison small blocks, so that a read after free changes the result.
    if (block.bytes <= 1 << 20) {
      block.owner->push([to = shadow_ + at, bytes = block.bytes] { std::memset(to, 0xFF, bytes); });
    }
    freed_[block.owner->id()][block.bytes].push_back(at);
  }

  void record(void* pointer, Queue& queue) {
    std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<char*>(pointer) - base_);
    if (found != blocks_.end() && found->second.owner != &queue) found->second.used_by.insert(&queue);
  }

  /// Waits for all streams; then what they freed is anybody's.
  void give_back() {
    synchronize();
    std::lock_guard lock(mutex_);
    for (auto& [stream, sizes] : freed_) {
      for (auto& [bytes, all] : sizes) {
        for (const std::size_t at : all) {
          join(at, bytes);
        }
      }
    }
    freed_.clear();
  }

 private:
  struct Block {
    std::size_t bytes;
    Queue* owner;
    std::set<Queue*> used_by;
  };

  bool take(std::size_t bytes, std::size_t& at) {
    for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
      if (hole->second < bytes) continue;
      at = hole->first;
      const std::size_t rest = hole->second - bytes;
      free_.erase(hole);
      if (rest) free_[at + bytes] = rest;
      return true;
    }
    return false;
  }

  void join(std::size_t at, std::size_t bytes) {
    auto next = free_.lower_bound(at);
    if (next != free_.end() && at + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += bytes;
        return;
      }
    }
    free_[at] = bytes;
  }

  std::mutex mutex_;
  const std::size_t bytes_;
  char *base_, *shadow_;
  std::map<std::size_t, std::size_t> free_;  // at: bytes
  std::map<c10::StreamId, std::map<std::size_t, std::vector<std::size_t>>> freed_;
  std::map<std::size_t, Block> blocks_;
  std::size_t used_ = 0, peak_ = 0;
};

// --- an access by the host ---

thread_local const char* operator_now = nullptr;
const Memory* memory_of_handler = nullptr;
struct sigaction previous_handler;

void on_fault(int signal, siginfo_t* info, void* context) {
  if (memory_of_handler && memory_of_handler->holds(info->si_addr)) {
    const char* const name = operator_now ? operator_now : "no operator";
    const char* const parts[] = {"sim: the host touched memory of the device, in ", name, "\n"};
    for (const char* part : parts) (void)!::write(2, part, std::strlen(part));
  }
  ::sigaction(SIGSEGV, &previous_handler, nullptr);
  if (previous_handler.sa_flags & SA_SIGINFO && previous_handler.sa_sigaction) {
    return previous_handler.sa_sigaction(signal, info, context);
  }
}

struct NameBefore : at::ObserverContext {
  const char* name = nullptr;
};

void watch_the_host(const Memory& memory) {
  memory_of_handler = &memory;
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigaction(SIGSEGV, &action, &previous_handler);
  at::addGlobalCallback(at::RecordFunctionCallback(
                            [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
                              auto before = std::make_unique<NameBefore>();
                              before->name = std::exchange(operator_now, function.name());
                              return before;
                            },
                            [](const at::RecordFunction&, at::ObserverContext* context) {
                              operator_now = static_cast<NameBefore*>(context)->name;
                            })
                            .scopes({at::RecordScope::FUNCTION}));
}

Memory& memory() {
  static auto* const made = [] {
    auto* const memory = new Memory;
    watch_the_host(*memory);
    return memory;
  }();
  return *made;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  static void free(void* pointer) { memory().free(pointer); }

  c10::DataPtr allocate(std::size_t bytes) override {
    void* const at = memory().allocate(bytes);
    return {at, at, &free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    current_queue().push([to = shadow(to), from = shadow(from), bytes] { std::memcpy(to, from, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { memory().give_back(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return memory().stats(); }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { memory().reset_peak(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override { return memory().info(); }
};

// --- pinned memory of the host ---

struct Pinned {
  struct Freed {
    void* at;
    std::vector<Event> after;  // of streams that may still reach it
  };
  std::mutex mutex;
  std::map<const char*, std::size_t> ranges;
  std::deque<Freed> freed;
};
Pinned& pinned() {
  static auto* const made = new Pinned;
  return *made;
}

struct PinnedAllocator final : at::HostAllocator {
  /// The host goes on; the memory is kept until no transfer can reach it.
  static void free(void* pointer) {
    std::vector<Event> after = all_under_way();
    std::lock_guard lock(pinned().mutex);
    pinned().ranges.erase(static_cast<const char*>(pointer));
    pinned().freed.push_back({pointer, std::move(after)});
    const auto past = [](const Event& event) { return event.queue->done(event.position); };
    std::erase_if(pinned().freed, [&](const Pinned::Freed& freed) {
      const bool unused = std::all_of(freed.after.begin(), freed.after.end(), past);
      if (unused) std::free(freed.at);
      return unused;
    });
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free, c10::kCPU};
    void* const at = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    TORCH_CHECK(at, "sim: no pinned memory");
    std::lock_guard lock(pinned().mutex);
    pinned().ranges[static_cast<const char*>(at)] = bytes;
    return {at, at, &free, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

void* shadow(const void* at) {
  if (!at) return nullptr;
  TORCH_INTERNAL_ASSERT(memory().holds(at), "sim: not memory of the device");
  return memory().shadow(at);
}

c10::Allocator* device_allocator() {
  static auto* const made = new DeviceAllocator;
  return made;
}

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  if (data.get()) memory().record(data.get(), queue_of(stream));
}

bool is_pinned(const void* at, std::size_t bytes) {
  std::lock_guard lock(pinned().mutex);
  const char* const begin = static_cast<const char*>(at);
  const char* const end = begin + bytes;
  const auto next = pinned().ranges.upper_bound(begin);
  const char* of_last = nullptr;  // the end of the range that begins before
  if (next != pinned().ranges.begin()) of_last = std::prev(next)->first + std::prev(next)->second;
  const bool is_inside = begin < of_last;
  TORCH_CHECK(!is_inside || end <= of_last, "sim: invalid argument: a copy passes the end of registered memory");
  TORCH_CHECK(is_inside || next == pinned().ranges.end() || end <= next->first,
              "sim: invalid argument: a copy passes the start of registered memory");
  return is_inside;
}

c10::Allocator* pinned_allocator() {
  static auto* const made = new PinnedAllocator;
  return made;
}

}  // namespace sim

// As cudaHostRegister: torch_device.cpp looks for the name that the backend has.
extern "C" {
int simHostRegister(void* at, std::size_t bytes, unsigned) {
  std::lock_guard lock(sim::pinned().mutex);
  return !sim::pinned().ranges.emplace(static_cast<const char*>(at), bytes).second;
}
int simHostUnregister(void* at) {
  std::lock_guard lock(sim::pinned().mutex);
  return sim::pinned().ranges.erase(static_cast<const char*>(at)) == 0;
}
int simGetLastError() { return 0; }
}

namespace c10 {
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, sim::device_allocator());
}
namespace at {
REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, static_cast<at::HostAllocator*>(sim::pinned_allocator()));
}
