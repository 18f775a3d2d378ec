// scale TENSORS EVICTIONS DIRECTORY PAGE_KIB
//
// Uses TENSORS tensors of 1 to 9 pages in turn, repeatedly, with memory for a quarter of them and a disk that takes
// no time. It creates and destroys one in ten of them, as happens to gradients. Prints the number of pages,
// microseconds of processor time per eviction with its fault, and the bytes of the swap file. The swap file is
// sparse: no byte of it, or of memory, is touched. bench/scale.py compares sizes.
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/pager/frame_cache.h"

using namespace zeropage;

/// In place of libc's: the swap file takes no space on the disk.
extern "C" int fallocate(int file, int, off_t offset, off_t bytes) { return ::ftruncate(file, offset + bytes); }

namespace {

/// Ends what is started, in order, on a thread of its own. No byte moves.
class InstantIo final : public Io {
 public:
  ~InstantIo() override {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void start(const Transfer&, Priority, Completion completion) override {
    std::lock_guard lock(mutex_);
    started_.push_back(std::move(completion));
    changed_.notify_all();
  }
  void wait_all() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return started_.empty() && !running_; });
  }
  std::string_view name() const override { return "instant"; }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return closing_ || !started_.empty(); });
      if (started_.empty()) return;
      Completion completion = std::move(started_.front());
      started_.pop_front();
      running_ = true;
      lock.unlock();
      std::exchange(completion, nullptr)(nullptr);
      lock.lock();
      running_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Completion> started_;
  bool closing_ = false, running_ = false;
  std::thread thread_{[this] { work(); }};
};

struct Tensor final : Segment {
  ~Tensor() override {
    if (cache()) cache()->release(*this);
  }
  void expose(std::byte*) override {}
  void hide() override {}
};

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

int main(int count, char** arguments) try {
  if (count != 5) {
    std::fprintf(stderr, "usage: scale TENSORS EVICTIONS DIRECTORY PAGE_KIB\n");
    return 2;
  }
  const auto tensors = static_cast<std::size_t>(std::atoll(arguments[1]));
  const auto evictions = static_cast<std::size_t>(std::atoll(arguments[2]));
  const std::size_t page = static_cast<std::size_t>(std::atoll(arguments[4])) * kKiB;
  std::mt19937 random(1);
  std::vector<std::size_t> pages(tensors);
  std::size_t all_pages = 0;
  for (std::size_t& n : pages) all_pages += n = 1 + random() % 9;

  const auto cache = FrameCache::make(
      {.device_bytes = all_pages * page / 4, .host_bytes = 0, .disk_path = arguments[3], .page_bytes = page},
      std::make_unique<InstantIo>());
  std::vector<std::unique_ptr<Tensor>> alive(tensors);
  const auto use = [&](std::size_t i) {
    const bool is_gradient = i % 10 == 9, is_new = !alive[i];
    if (is_new) {
      alive[i] = std::make_unique<Tensor>();
      cache->bind(*alive[i], {pages[i] * page, 0, is_gradient ? Role::gradient : Role::optimizer, Tier::disk});
    }
    const PinRequest request{alive[i].get(), is_new ? Access::overwrite : Access::write};
    cache->pin({&request, 1});
    cache->unpin({&request, 1});
    // It dies half a period later.
    if (is_gradient) alive[(i + tensors / 20 * 10) % tensors].reset();
  };
  for (std::size_t i = 0; i < 3 * tensors; ++i) use(i % tensors);  // until the plan is known
  cache->wait();
  const auto before = cache->stats();
  const double start = processor_seconds();
  std::size_t used = 0;
  for (; cache->stats().evictions - before.evictions < evictions; ++used) use(used % tensors);
  const double seconds = processor_seconds() - start;
  cache->wait();
  const double moved = static_cast<double>(cache->stats().evictions - before.evictions);
  std::printf("%zu %.3f %zu\n", all_pages, seconds / moved * 1e6, cache->swap_bytes());
  const double closing = processor_seconds();
  alive.clear();
  cache->close();
  std::fprintf(stderr, "%.1f us a tensor to die and close\n",
               (processor_seconds() - closing) / static_cast<double>(tensors) * 1e6);
} catch (const Error& error) {
  std::fprintf(stderr, "scale: %s\n", error.what());
  return 1;
}
