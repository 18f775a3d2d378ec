// Which neighbours leave where a frame needs a hole.
#include "zeropage/pager/cache/frame_memory.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>

#include "queued_device.h"
#include "zeropage/base/units.h"

using namespace zeropage;

TEST_CASE("of all neighbours that make a hole those leave whose earliest use is the latest") {
  constexpr std::size_t kUnit = 4 * kBlockBytes, kUnits = 40;
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](unsigned end) { return static_cast<unsigned>(random() % end); };
    std::vector<std::unique_ptr<Run>> runs;
    FrameMemory memory(kUnits * kUnit, std::make_shared<QueuedDevice>(kUnits * kUnit), {}, std::nullopt);
    std::vector<Frame*> frames;
    bool fragmented = false;
    for (Frame* frame = nullptr;; frames.push_back(frame)) {
      runs.push_back(std::make_unique<Run>());
      runs.back()->bytes = runs.back()->page_bytes = (1 + below(4)) * kUnit;
      runs.back()->pages = std::vector<Page>(1);
      if (!(frame = memory.try_make(*runs.back(), 0, 1, false, false, fragmented))) break;
    }
    std::set<const Frame*> held;
    for (Frame* frame : frames) {
      const unsigned fate = below(5);
      if (fate == 0) {
        memory.drop(*frame);
        continue;
      }
      frame->next_use = 1 + below(30);
      if (fate == 1) held.insert(frame);
    }
    const auto may_leave = [&](const Frame& frame) { return !held.contains(&frame); };

    // The owner of each unit of memory. The test looks at every window without held frames.
    const Frame* owner[kUnits] = {};
    std::byte* const base = memory.device()->region().data();
    for (const auto& [data, frame] : memory.frames()) {
      for (std::size_t i = 0; i < frame->memory.bytes() / kUnit; ++i) owner[(data - base) / kUnit + i] = frame.get();
    }
    const auto earliest_of = [&](const auto& some) {
      std::uint64_t earliest = ~std::uint64_t{0};
      for (const Frame* frame : some) earliest = std::min(earliest, frame->next_use);
      return earliest;
    };
    const std::size_t wanted = 1 + below(12);
    std::uint64_t best = 0;
    for (std::size_t first = 0; first + wanted <= kUnits; ++first) {
      std::set<const Frame*> there(owner + first, owner + first + wanted);
      there.erase(nullptr);
      if (std::ranges::all_of(there, [&](const Frame* frame) { return may_leave(*frame); })) {
        best = std::max(best, earliest_of(there));
      }
    }
    const auto window = memory.window(wanted * kUnit, may_leave);
    CAPTURE(seed);
    CHECK(std::ranges::all_of(window, [&](const Frame* frame) { return may_leave(*frame); }));
    if (best == 0) {
      CHECK(window.empty());
    } else {
      CHECK(earliest_of(window) == best);
      // Without them there is such a hole.
      std::size_t hole = 0, longest = 0;
      for (const Frame* frame : owner) {
        const bool is_free = !frame || std::ranges::find(window, frame) != window.end();
        longest = std::max(longest, hole = is_free ? hole + 1 : 0);
      }
      CHECK(longest >= wanted);
    }
  }
}
