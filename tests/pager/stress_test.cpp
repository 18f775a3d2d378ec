// Many threads, little memory, and a disk that is slow and fails: whatever happens, a page holds what was last
// written to it. To be run under the thread sanitizer too.
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <shared_mutex>
#include <thread>

#include "queued_device.h"
#include "rank_fixture.h"
#include "zeropage/base/errors.h"
#include "zeropage/io/buffers.h"

using namespace zeropage;

namespace {

constexpr unsigned kZeros = 0;  // the seed of a page that was never written

std::byte content(unsigned seed, std::size_t i) {
  return seed == kZeros ? std::byte{0} : CacheFixture::pattern(seed, i);
}

void write_page(std::byte* data, std::size_t bytes, unsigned seed) {
  for (std::size_t i = 0; i < bytes; ++i) data[i] = content(seed, i);
}

bool is_page(const std::byte* data, std::size_t bytes, unsigned seed) {
  for (std::size_t i = 0; i < bytes; ++i) {
    if (data[i] != content(seed, i)) return false;
  }
  return true;
}

/// A tensor that several threads use: what writes it, or replaces it, does so alone.
struct Shared {
  std::shared_mutex mutex;
  std::shared_ptr<TestSegment> segment;  // a checkpoint keeps it alive
  std::vector<unsigned> seeds;           // by page
};

struct Stress : CacheFixture {
  std::vector<Shared> tensors{24};
  std::atomic<unsigned> seeds{1};
  std::atomic<int> wrong{0}, disk_errors{0}, budget_errors{0}, closed{0}, done{0};
  std::atomic<unsigned> requests{0};
  bool saves = true;
  std::atomic<int> saved{0};             // pages
  std::shared_ptr<QueuedDevice> device;  // null: the CPU

  void make_unreliable(std::size_t device_bytes, std::size_t host_bytes) {
    auto failing = std::make_unique<FailingIo>(3);
    failing->set_outcome([this](const Transfer&) {
      const unsigned n = (++requests * 2654435761U) >> 16;
      if (n % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      return n % 101 == 0 ? -static_cast<long>(EIO) : 1L;
    });
    cache = FrameCache::make({.device_bytes = device_bytes,
                              .host_bytes = host_bytes,
                              .disk_path = directory.path(),
                              .page_bytes = kPage,
                              .device = device},
                             std::move(failing));
  }

  /// An operator, where operators run.
  template <class Operator>
  void run(Operator&& run) {
    if (!device) return run();
    device->run(std::ref(run));
    device->wait(device->record());
  }

  void create(Shared& tensor, std::mt19937& random) {
    const std::size_t bytes = random() % 3 == 0 ? 100 + random() % 900 : 5'000 + random() % 90'000;
    tensor.segment.reset();
    auto made = segment(bytes);
    tensor.seeds.assign(made->pages(), kZeros);
    tensor.segment = std::move(made);
  }

  void use_page(std::byte* data, std::size_t bytes, unsigned& seed, Access access) {
    run([&] {
      if (access != Access::overwrite) wrong += !is_page(data, bytes, seed);
      if (access != Access::read) write_page(data, bytes, seed = seeds++);
    });
  }

  void use_whole(Shared& tensor, Access access) {
    TestSegment& segment = *tensor.segment;
    const PinRequest request{&segment, access};
    cache->pin({&request, 1});
    for (std::size_t page = 0; page < segment.pages(); ++page) {
      use_page(segment.data + page * segment.page_bytes(), segment.bytes_of(page), tensor.seeds[page], access);
    }
    cache->unpin({&request, 1});
  }

  void use_pages(Shared& tensor, Access access, std::mt19937& random) {
    TestSegment& segment = *tensor.segment;
    const PinRequest request{&segment, access};
    if (random() % 2) cache->announce({&request, 1});
    PagePin before;
    for (std::size_t page = 0; page < segment.pages(); ++page) {
      PagePin pin = random() % 4 ? PagePin{} : cache->try_pin_page(segment, page, access);
      if (!pin) pin = cache->pin_page(segment, page, access);
      pin.wait();
      use_page(pin.data(), segment.bytes_of(page), tensor.seeds[page], access);
      pin.written();  // the next page's error ends this pin by an exception
      if (random() % 4 == 0) pin.will_not_reuse();
      before = std::move(pin);  // two are held at once
    }
    if (random() % 8 == 0) std::thread([pin = std::move(before)] {}).join();
  }

  /// Takes a tensor as it is, and reads it while others write it.
  void save(Shared& tensor, std::mt19937& random) {
    std::shared_ptr<TestSegment> alive;
    std::vector<unsigned> then;
    FrozenSegment frozen;  // dies first
    {
      std::unique_lock lock(tensor.mutex);
      if (!tensor.segment || !cache->can_freeze(*tensor.segment)) return;
      alive = tensor.segment;
      then = tensor.seeds;
      frozen = cache->freeze(*alive);
    }
    const Buffer memory = make_buffer(kPage);
    for (std::size_t page = 0; page < frozen.pages(); ++page) {
      if (random() % 64 == 0) return;  // gives up
      if (frozen.place(page) == Frozen::Place::nowhere) {
        wrong += then[page] != kZeros;
        continue;
      }
      while (frozen.place(page) != Frozen::Place::home) {
        const PagePin pin = frozen.try_pin(page);
        if (pin && frozen.begin_copy(page)) {
          wrong += !is_page(pin.data(), frozen.bytes_of(page), then[page]);
          frozen.end_copy(page);
          ++saved;
          break;
        }
      }
      if (frozen.place(page) == Frozen::Place::nowhere) continue;
      HomeRead read = frozen.read(page, memory.get());
      wrong += !read.wait() || !is_page(memory.get(), frozen.bytes_of(page), then[page]);
      ++saved;
    }
  }

  void use_something(std::mt19937& random) {
    Shared& tensor = tensors[random() % tensors.size()];
    if (saves && random() % 16 == 0) return save(tensor, random);
    const unsigned what = random() % 16;
    if (what < 7) {
      std::shared_lock lock(tensor.mutex);
      if (!tensor.segment) return;
      if (what < 3) return use_whole(tensor, Access::read);
      if (what < 5) return use_pages(tensor, Access::read, random);
      if (what == 5) return cache->evict(*tensor.segment);
      return cache->wait();
    }
    std::unique_lock lock(tensor.mutex);
    if (!tensor.segment || what == 7) return create(tensor, random);
    const Access access = random() % 2 ? Access::write : Access::overwrite;
    if (what < 11) return use_whole(tensor, access);
    if (what < 14) return use_pages(tensor, access, random);
    if (what == 14) return tensor.segment.reset();
    cache->zero(*tensor.segment);
    tensor.seeds.assign(tensor.seeds.size(), kZeros);
  }

  static constexpr int kThreads = 4;

  /// Closes the cache after some uses.
  void run_threads(int uses) {
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < kThreads; ++t) threads.emplace_back([this, t] { work(t + 1); });
    while (done < uses) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    cache->close();
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(closed == kThreads);
    CHECK(disk_errors > 0);
    CHECK(budget_errors == 0);
    CHECK((saved > 0) == saves);
    CHECK(cache->stats().evictions > 100);
    for (const Pool pool : {Pool::device, Pool::host}) {
      CHECK(cache->usage(pool).peak <= cache->usage(pool).limit);
      CHECK(cache->usage(pool).now == 0);
    }
  }

  /// Until the cache is closed.
  void work(unsigned seed) {
    std::mt19937 random(seed);
    while (true) {
      try {
        use_something(random);
      } catch (const DiskError&) {
        ++disk_errors;
      } catch (const BudgetError&) {
        ++budget_errors;
      } catch (const AccessError&) {
        ++closed;
        return;
      }
      ++done;
    }
  }
};

}  // namespace

TEST_CASE_FIXTURE(Stress, "threads that use one cache at once find what was written, until it is closed under them") {
  make_unreliable(kThreads * 100 * kKiB, 0);
  run_threads(2'500);
}

TEST_CASE_FIXTURE(Stress,
                  "threads that use one device at once find what was written, until it is closed under them") {
  device = std::make_shared<QueuedDevice>(kThreads * 100 * kKiB);
  make_unreliable(kThreads * 100 * kKiB, 24 * kPage);
  run_threads(1'500);
}

TEST_CASE("threads create, gather, write and drop tensors that share gathered pages at once") {
  Meeting meeting(1);  // of one rank: nothing has to be in the same order elsewhere
  Rank self(meeting, 0, 24 * kPage);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  std::atomic<std::uint64_t> number{0};
  std::shared_mutex writing;  // what gathers while a share is being written may see half of it
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<Tensor> tensors;
      for (unsigned step = 0; step < 250; ++step) {
        const unsigned what = random() % 8;
        std::shared_lock lock(writing);
        if (tensors.size() < 4 || what == 0) {
          tensors.push_back(self.make_tensor(random() % 4 ? 20 + random() % 60 : 500 + random() % 4'000, ++number));
          continue;
        }
        const std::size_t which = random() % tensors.size();
        Tensor& tensor = tensors[which];
        if (what == 1) {
          std::swap(tensor, tensors.back());  // erase() would destroy its share first
          tensors.pop_back();
        } else if (what < 4) {
          lock.unlock();
          const std::unique_lock alone(writing);
          try {
            self.write_share(tensor, 1000 * t + step);
            tensor.seed = 1000 * t + step, tensor.written = true;
          } catch (const AccessError&) {  // another thread has pinned the page, for another tensor on it
          }
        } else if (what == 4) {
          self.write(*tensor.whole, tensor.seed = 1000 * t + step);
          self.cache->store(*tensor.whole);
          tensor.written = true;
        } else if (tensor.written) {
          wrong += !self.holds(*tensor.whole, tensor.seed);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(self.ranks->log.size() > 100);
}
