#include "zeropage/pager/cache/frame_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>

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

namespace {

bool is_poisoned() {
  static const bool is_set = std::getenv("ZEROPAGE_POISON") != nullptr;
  return is_set;
}

}  // namespace

void FrameMemory::poison(const Frame& frame) const {
  if (!is_poisoned() || device_ || hollow_) return;
  constexpr std::uint16_t kWord = 0xffa5;  // of 2, 4 and 8 bytes, each a signalling NaN
  for (std::size_t i = 0; i + sizeof kWord <= frame.memory.bytes(); i += sizeof kWord) {
    std::memcpy(frame.memory.data() + i, &kWord, sizeof kWord);
  }
}

Frame* FrameMemory::try_make(Run& run, std::size_t first_page, std::size_t pages, bool for_long, bool must,
                             bool& fragmented) {
  const std::size_t bytes = bytes_of(run, first_page, pages);
  fragmented = false;
  Reservation charge = budget_.try_reserve(bytes);
  if (!charge) return nullptr;
  auto memory = arena_->try_allocate(bytes, for_long ? FreeList::Side::top : FreeList::Side::bottom, must);
  if (!memory) {
    fragmented = true;
    return nullptr;
  }
  auto frame = std::make_unique<Frame>();
  frame->run = &run;
  frame->ordinal = run.ordinal;
  frame->number = ++made_;
  frame->shares_page = run.shares_page();
  frame->run_pages = run.pages.size();
  frame->first_page = first_page;
  frame->pages = pages;
  frame->memory = std::move(*memory);
  frame->charge = std::move(charge);
  frame->pins = 1;
  if (device_) device_->reuse({frame->memory.data(), frame->memory.bytes()});
  if (!for_long) poison(*frame);
  Frame* made = frame.get();
  std::set<Frame*> place{made};
  frame->place = place.extract(place.begin());
  frames_.emplace(made->memory.data(), std::move(frame));
  return made;
}

void FrameMemory::drop(Frame& frame) noexcept {
  retire(frame);
  frames_.erase(frame.memory.data());
}

/// Who takes the memory next waits for the frame's last use. If that cannot be noted, this thread waits.
void FrameMemory::retire(const Frame& frame) const noexcept {
  if (!device_) return;
  const auto& last = frame.last_used ? frame.last_used : frame.ready;
  try {
    device_->retire({frame.memory.data(), frame.memory.bytes()}, last);
  } catch (...) {
    try {
      device_->wait(last);
    } catch (...) {  // a device that has failed has lost its results too
    }
  }
}

/// Both ends of the window go along the memory once.
std::vector<Frame*> FrameMemory::window(std::size_t bytes, const std::function<bool(const Frame&)>& may_leave) const {
  struct Place {
    std::byte* begin;
    std::byte* end;
    Frame* frame;  // null: a hole
    std::uint64_t next_use;
  };
  std::vector<Place> line;
  std::size_t first = 0, best_first = 0, best_last = 0;
  std::uint64_t best = 0;
  std::deque<std::size_t> earliest;  // from `first` on: the earliest use, then the earliest after that, and so on
  const auto add = [&](std::byte* begin, std::byte* end, Frame* frame) {
    line.push_back({begin, end, frame, frame ? frame->next_use : ~std::uint64_t{0}});
    while (!earliest.empty() && line[earliest.back()].next_use >= line.back().next_use) earliest.pop_back();
    earliest.push_back(line.size() - 1);
    for (; first < line.size() && end - line[first].begin >= static_cast<std::ptrdiff_t>(bytes); ++first) {
      const std::uint64_t use = line[earliest.front()].next_use;
      if (best_last == 0 || use > best) best = use, best_first = first, best_last = line.size();
      if (earliest.front() == first) earliest.pop_front();
    }
  };
  std::byte* at = arena_->base();
  for (const auto& [data, frame] : frames_) {
    if (data > at) add(at, data, nullptr);
    at = data + frame->memory.bytes();
    if (may_leave(*frame)) {
      add(data, at, frame.get());
    } else {
      first = line.size();
      earliest.clear();
    }
  }
  if (std::byte* const end = arena_->base() + arena_->capacity(); end > at) add(at, end, nullptr);

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

/// In a planned run, adds the time for `bytes` to the thread's debt. The thread pays when it next computes or waits.
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
  try {
    order_after(frame);                     // this thread's stream may not have used it before
    device_->stream_wait(frame.last_used);  // perhaps of another thread's stream
    frame.last_used = device_->record();
  } catch (const std::bad_alloc&) {
    device_->finish();
    device_->wait(frame.ready);
    device_->wait(frame.last_used);
    frame.ready = frame.last_used = nullptr;
  }
}

DeviceMemory::Event FrameMemory::record() const {
  if (!device_) return nullptr;
  try {
    return device_->record();
  } catch (const std::bad_alloc&) {
    device_->finish();
    return nullptr;
  }
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
