// The thread that writes checkpoints, and the comparison of all content at the end.
#include <fmt/format.h>

#include <deque>
#include <vector>

#include "simulate/program.h"
#include "zeropage/io/buffers.h"

namespace zeropage::simulate {
namespace {

/// Copies a page from its frame. False if it was written home meanwhile.
bool save_frame(World& world, SavedSegment& saved, std::size_t page) {
  const Asking asking(world, 0, round_up(saved.segment->bytes(), kBlockBytes));
  PagePin pin;
  while (!(pin = saved.frozen.try_pin(page))) {
    if (saved.frozen.place(page) == Frozen::Place::home) return false;
    world.threads.sleep_for(std::chrono::milliseconds(1));
  }
  if (!saved.frozen.begin_copy(page)) return false;
  world.threads.yield('o');
  const auto check = [&] {
    world.check(*saved.segment, page, saved.model[page], pin.data(), "a checkpoint of a frame");
  };
  saved.frozen.is_on_device() ? world.device->run_now(check) : check();
  saved.frozen.end_copy(page);
  ++world.result.saved_pages;
  return true;
}

void save_homes(World& world, SavedSegment& saved, const std::vector<std::size_t>& pages) {
  constexpr std::size_t kAhead = 3;
  std::deque<std::pair<Buffer, HomeRead>> reads;
  std::size_t started = 0;
  for (const std::size_t page : pages) {
    for (; started < pages.size() && reads.size() < kAhead; ++started) {
      Buffer memory = make_buffer(round_up(saved.frozen.bytes_of(pages[started]), kBlockBytes));
      HomeRead read = saved.frozen.read(pages[started], memory.get());
      reads.emplace_back(std::move(memory), std::move(read));
    }
    if (!reads.front().second.wait()) world.threads.fail("a read of frozen content says that it changed");
    world.check(*saved.segment, page, saved.model[page], reads.front().first.get(), "a checkpoint from home");
    reads.pop_front();
    ++world.result.saved_pages;
  }
}

/// As checkpoint/snapshot.cpp does: frames first, since operators cannot write those pages until they are copied.
void save(World& world, SavedSegment& saved) {
  world.threads.doing(fmt::format("save {}", saved.segment->id()));
  std::vector<std::size_t> at_home;
  for (std::size_t page = 0; page < saved.frozen.pages(); ++page) {
    const Frozen::Place place = saved.frozen.place(page);
    if (place == Frozen::Place::nowhere) {
      if (!saved.model[page].may_be(0) && !world.is_closing) {
        world.threads.fail(fmt::format("a checkpoint takes page {} of segment {} for zeros; it must hold {}", page,
                                       saved.segment->id(), saved.model[page].stamp >> 24));
      }
    } else if (place == Frozen::Place::home || !save_frame(world, saved, page)) {
      at_home.push_back(page);
    }
  }
  save_homes(world, saved, at_home);
}

}  // namespace

void save_all(World& world) {
  while (true) {
    SavedSegment saved;
    {
      std::unique_lock lock(world.mutex);
      world.threads.doing("waits for checkpoints");
      world.changed.wait(lock, [&] { return !world.to_save.empty() || world.no_more; });
      if (world.to_save.empty()) return;
      saved = std::move(world.to_save.front());
      world.to_save.pop_front();
    }
    try {
      if (!world.is_closing) save(world, saved);
    } catch (const DiskError& error) {
      world.judge(error);
    } catch (const AccessError& error) {
      if (!world.is_closing) world.threads.fail(error.what());
    }
  }
}

void check_everything(World& world) {
  FrameCache& cache = *world.cache;
  world.threads.doing("checks everything at the end");
  for (int i = 0; i < 4; ++i) {
    try {
      cache.wait();
    } catch (const DiskError&) {  // of a write that failed before
    }
  }
  for (const bool from_home : {false, true}) {
    for (const auto& segments : world.segments) {
      for (const auto& segment : segments) {
        if (!segment) continue;
        world.order_after_writes(*segment);
        if (from_home) cache.evict(*segment);
        const PinRequest request{segment.get(), Access::read};
        if (!from_home) cache.pin({&request, 1});
        for (std::size_t page = 0; page < segment->pages(); ++page) {
          PagePin pin;
          if (from_home) pin = cache.pin_page(*segment, page, Access::read);
          pin.wait();
          world.check_operand(*segment, page, segment->model[page], from_home ? pin.data() : segment->at(page),
                              from_home ? "at the end, from home" : "at the end", /*now=*/true);
        }
        if (!from_home) cache.unpin({&request, 1});
      }
    }
  }
  for (int i = 0; i < 3; ++i) {  // the end of a write may start a read ahead
    for (const auto& segments : world.segments) {
      for (const auto& segment : segments) {
        if (segment) cache.evict(*segment);
      }
    }
    cache.wait();
  }
  if (!world.device) world.check_rest("after all was evicted");  // else transfers below start reads ahead
  world.segments.clear();
  cache.wait();
  world.check_rest("after all was released");
}

}  // namespace zeropage::simulate
