#include "zeropage/rules/windows.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <doctest/doctest.h>

#include <mutex>
#include <vector>

using namespace zeropage;

TEST_CASE("chunks are at::parallel_for's own") {
  for (const std::size_t elements :
       {std::size_t{100}, std::size_t{32768}, std::size_t{77100}, std::size_t{1} << 20}) {
    std::mutex mutex;
    std::vector<Cut> expected;
    if (elements < at::internal::GRAIN_SIZE || at::get_num_threads() == 1) {
      expected.push_back({0, elements});
    } else {
      at::parallel_for(0, static_cast<std::int64_t>(elements), at::internal::GRAIN_SIZE,
                       [&](std::int64_t begin, std::int64_t end) {
                         std::lock_guard lock(mutex);
                         expected.push_back({static_cast<std::size_t>(begin), static_cast<std::size_t>(end)});
                       });
    }
    const std::size_t threads = at::get_num_threads();
    for (const Cut& cut : expected) {
      for (const std::size_t at : {cut.begin, (cut.begin + cut.end) / 2, cut.end - 1}) {
        const Cut found = chunk_of(elements, at, Chunking::iterator, threads);
        CHECK(found.begin == cut.begin);
        CHECK(found.end == cut.end);
      }
    }
  }
}

TEST_CASE("windows cover a chunk, end only on whole vectors from its start, and straddle at most one vector") {
  for (const std::size_t page : {1024u, 5000u, 4096u}) {
    const Cut chunk{333, 40001};
    std::size_t at = chunk.begin;
    while (at < chunk.end) {
      const std::size_t edge = (at / page + 1) * page;
      const Cut window = window_at(at, edge, chunk);
      CHECK(window.begin == at);
      REQUIRE(window.end > at);
      CHECK((window.end == chunk.end || (window.end - chunk.begin) % kVector == 0));
      if (window.end > edge) CHECK(window.end - window.begin <= kVector);
      at = window.end;
    }
    CHECK(at == chunk.end);
  }
}
