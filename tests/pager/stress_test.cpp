// Many threads, little memory, and a disk that is slow and fails: whatever happens, a page holds what was last
// written to it. To be run under the thread sanitizer too.
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <shared_mutex>
#include <thread>

#include "rank_fixture.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

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
          } catch (const AccessError&) {  // another thread has pinned the page, for a tensor beside this one
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
