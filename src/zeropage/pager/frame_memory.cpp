#include "zeropage/pager/frame_memory.h"

#include <algorithm>
#include <cstring>

#include "zeropage/base/clock.h"
#include "zeropage/base/units.h"

namespace zeropage {

FrameMemory::FrameMemory(std::size_t bytes, std::shared_ptr<DeviceMemory> device, Arena::SlabHook on_first_use,
                         std::optional<Hollow> hollow)
    : device_(std::move(device)),
      hollow_(hollow),
      budget_("memory", bytes),
      arena_(device_  ? std::make_unique<Arena>(device_->region())
             : hollow ? Arena::make_hollow(bytes)
                      : std::make_unique<Arena>(bytes, std::move(on_first_use))) {}

std::size_t FrameMemory::bytes_of(const Run& run, std::size_t first_page, std::size_t pages) {
  const std::size_t end = std::min(run.bytes, (first_page + pages) * run.page_bytes);
  return round_up(end - first_page * run.page_bytes, kBlockBytes);
}

std::byte* FrameMemory::address(const Run& run, std::size_t page) {
  const Frame& frame = *run.pages[page].frame;
  return frame.memory.data() + (page - frame.first_page) * run.page_bytes;
}

Frame* FrameMemory::try_make(Run& run, std::size_t first_page, std::size_t pages, bool permanent, bool& fragmented) {
  const std::size_t bytes = bytes_of(run, first_page, pages);
  fragmented = false;
  Reservation charge = budget_.try_reserve(bytes);
  if (!charge) return nullptr;
  auto memory = arena_->try_allocate(bytes, permanent ? FreeList::Side::top : FreeList::Side::bottom);
  if (!memory) {
    fragmented = true;
    return nullptr;
  }
  auto frame = std::make_unique<Frame>();
  frame->run = &run;
  frame->ordinal = run.ordinal;
  frame->shares_page = run.shares_page();
  frame->run_pages = run.pages.size();
  frame->first_page = first_page;
  frame->pages = pages;
  frame->memory = std::move(*memory);
  frame->charge = std::move(charge);
  frame->permanent = permanent;
  frame->pins = 1;
  if (device_) device_->reuse({frame->memory.data(), frame->memory.bytes()});
  Frame* made = frame.get();
  std::set<Frame*> place{made};
  frame->place = place.extract(place.begin());
  frames_.emplace(made->memory.data(), std::move(frame));
  return made;
}

void FrameMemory::drop(Frame& frame) noexcept {
  try {
    if (device_) {
      device_->retire({frame.memory.data(), frame.memory.bytes()}, frame.last_used ? frame.last_used : frame.ready);
    }
  } catch (...) {  // a device that cannot wait for an event is lost, and so is what it computes
  }
  frames_.erase(frame.memory.data());
}

std::vector<Frame*> FrameMemory::window(std::size_t bytes, const std::function<bool(const Frame&)>& may_leave) const {
  struct Candidate {
    std::byte* begin;
    std::byte* end;
    Frame* frame;  // null: a hole
  };
  std::vector<Candidate> line;
  std::byte* at = arena_->base();
  for (const auto& [data, frame] : frames_) {
    if (data > at) line.push_back({at, data, nullptr});
    at = data + frame->memory.bytes();
    line.push_back({data, at, frame.get()});
  }
  if (std::byte* end = arena_->base() + arena_->capacity(); end > at) line.push_back({at, end, nullptr});

  std::uint64_t best = 0;
  std::size_t best_first = 0, best_last = 0;
  for (std::size_t first = 0; first < line.size(); ++first) {
    std::uint64_t earliest = ~std::uint64_t{0};
    for (std::size_t last = first; last < line.size(); ++last) {
      if (Frame* frame = line[last].frame) {
        if (!may_leave(*frame)) break;
        earliest = std::min(earliest, frame->next_use);
      }
      if (best_last > 0 && earliest <= best) break;
      if (line[last].end - line[first].begin >= static_cast<std::ptrdiff_t>(bytes)) {
        best = earliest, best_first = first, best_last = last + 1;
        break;
      }
    }
  }
  std::vector<Frame*> frames;
  for (std::size_t i = best_first; i < best_last; ++i) {
    if (line[i].frame) frames.push_back(line[i].frame);
  }
  return frames;
}

void FrameMemory::copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
  if (device_) return device_->copy(to, from, bytes);
  hollow_ ? take(2 * bytes) : void(std::memcpy(to, from, bytes));
}

void FrameMemory::clear(std::byte* at, std::size_t bytes) const {
  if (device_) return device_->clear(at, bytes);
  hollow_ ? take(bytes) : void(std::memset(at, 0, bytes));
}

/// In a planned run: the thread owes the time that so many bytes take, and pays when it next computes or waits.
void FrameMemory::take(std::size_t bytes) const {
  if (VirtualClock* const planned = VirtualClock::current()) planned->owe(bytes / hollow_->copy_rate);
}

// [Note: streams and frames] in store/device_memory.h.

void FrameMemory::order_after(Frame& frame) const {
  if (!device_ || !frame.ready) return;
  device_->done(frame.ready) ? frame.ready.reset() : device_->stream_wait(frame.ready);
}

void FrameMemory::mark_used(Frame& frame) const {
  if (!device_) return;
  device_->stream_wait(frame.last_used);  // of another thread's stream, perhaps
  frame.last_used = device_->record();
}

void FrameMemory::abandon() noexcept {
  new auto(std::move(frames_));
  new auto(std::move(device_));
  (void)arena_.release();
}

void FrameMemory::close() {
  frames_.clear();
  arena_.reset();
  device_.reset();
}

}  // namespace zeropage
