#include "zeropage/pager/cache/room.h"

#include <algorithm>

#include "zeropage/base/units.h"

namespace zeropage {
namespace {

/// The share of memory kept clean or being written if no plan says which frame leaves next.
constexpr std::size_t kBehindShare = 4;  // a quarter
}  // namespace

/// One make_frame() call.
struct Room::Making {
  std::size_t bytes, failed_before;
  bool fragmented = false, needs_window = false;
  bool clearing = false;  // its neighbours are being written
  bool must = false;      // nothing is left that could leave
};

std::size_t Room::demanded_bytes() const {
  std::size_t bytes = 0;
  for (const Making* making : demands_) bytes += making->bytes;
  return frames_.is_gathered() ? 0 : bytes;
}

Frame& Room::make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages, bool for_long) {
  Making making{FrameMemory::bytes_of(run, first_page, pages), transfers_.failed_writes()};
  if (making.bytes > memory_.budget().limit()) throw Shortage{};
  struct Demand {
    Room& room;
    std::list<const Making*>::iterator place;
    ~Demand() {
      room.demands_.erase(place);
      if (!room.demands_.empty()) room.monitor_.changed().notify_all();
    }
  } demand{*this, demands_.insert(demands_.end(), &making)};
  while (true) {
    monitor_.check_usable();
    if (wait_for_turn(lock, making)) continue;
    making.fragmented = false;
    if (Frame* frame = frames_.try_make(run, first_page, pages, for_long, making.must, making.fragmented))
      return *frame;
    making.needs_window = making.fragmented && !memory_.joins_holes();
    if (give_up_clean(making)) continue;
    frames_.plan_anew();
    if (making.needs_window ? clear_neighbours(lock, making) : send_victim_home(lock, making)) continue;
    if (wait_for_gather(lock) || wait_for_transfers(lock, making) || grants_.tidy_above(lock)) continue;
    if (making.fragmented && !std::exchange(making.must, true)) continue;
    // Threads that move pages hold frames for a moment.
    if (!making.needs_window && grants_.wait_for_others(lock)) {
      making.must = false;
      continue;
    }
    throw Shortage{};
  }
}

/// Freed bytes go to the oldest demand. Over ranks a thread waits for gathers that others complete.
bool Room::wait_for_turn(Lock& lock, const Making& making) {
  if (demands_.front() == &making || frames_.is_gathered()) return false;
  const std::function<bool()> is_its_turn = [&] { return demands_.front() == &making; };
  const Grants::Stuck stuck(grants_, is_its_turn);
  transfers_.wait_until(lock, is_its_turn, Cause::memory);
  return true;
}

/// After a write has failed: evicts a clean frame, or throws the write's error if there is none.
bool Room::give_up_clean(const Making& making) {
  if (transfers_.failed_writes() == making.failed_before || !transfers_.has_failed_write()) return false;
  Frame* const clean = frames_.victims().best_clean([](const Frame& f) { return !Frames::is_dirty(f); });
  if (!clean || making.needs_window) transfers_.throw_failed_write();
  frames_.evict(*clean);
  return true;
}

bool Room::clear_neighbours(Lock& lock, Making& making) {
  // Keeps clean frames that are used soon, if it can write others instead.
  const AccessPlan::Time soon = timeline_.now() + memory_.budget().limit() / 2;
  if (clear_window(making.bytes, soon, /*clean_only=*/true, lock)) return true;
  const bool may_write = !making.clearing || transfers_.writing_bytes() == 0;
  return making.clearing = may_write && clear_window(making.bytes, 0, false, lock);
}

bool Room::send_victim_home(Lock& lock, const Making& making) {
  Frame* const victim = frames_.victims().best(timeline_.now());
  if (!victim) return false;
  if (!Frames::is_dirty(*victim)) {
    frames_.evict(*victim);
    return true;
  }
  const std::size_t writing = transfers_.writing_bytes();
  // In pieces, free memory and its neighbours make a place for the frame with a little more.
  const std::size_t wanted = making.bytes + (making.fragmented ? 2 * kHugePageBytes : 0);
  const bool enough = !making.needs_window && writing > 0 && memory_.free_for(making.bytes) + writing >= wanted;
  // The victim must be written first. A clean frame that is not used soon leaves instead, to save the wait.
  Frame* const clean = frames_.victims().best_clean([](const Frame& f) { return !Frames::is_dirty(f); });
  const bool leaves = clean && clean->next_use > timeline_.now() + memory_.budget().limit() / 2;
  if (leaves) frames_.evict(*clean);
  if (!enough) transfers_.write_back(lock, *victim, Priority::demanded);
  return leaves || !enough;
}

/// Waits for one gather, in an order that is the same on all ranks. A gather ends only when a thread waits for it.
bool Room::wait_for_gather(Lock& lock) {
  if (!frames_.is_gathered() || transfers_.reading_bytes() == 0) return false;
  Frame* first = nullptr;
  const auto key = [](const Frame& f) { return std::pair(f.run ? f.run->number : 0, f.first_page); };
  for (const auto& [_, frame] : memory_.frames()) {
    if (!Frames::is_reading(*frame)) continue;
    if (!first || key(*frame) < key(*first)) first = frame.get();
  }
  if (first) transfers_.wait_for_reads(lock, *first);
  return first != nullptr;
}

/// Waits until one transfer has ended or, if neighbours must leave together, until all writes have.
bool Room::wait_for_transfers(Lock& lock, const Making& making) {
  const std::size_t writing = transfers_.writing_bytes(), reading = transfers_.reading_bytes(),
                    queued = frames_.victims().size();
  if (writing == 0 && reading == 0) return false;
  const auto is_another = [&] {
    if (making.needs_window && writing > 0) return transfers_.writing_bytes() == 0;
    return transfers_.writing_bytes() != writing || transfers_.reading_bytes() != reading ||
           frames_.victims().size() != queued;
  };
  transfers_.wait_until(lock, is_another, Cause::memory);
  return true;
}

Frame* Room::try_make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages,
                            AccessPlan::Time before) {
  const std::size_t demanded = demanded_bytes();
  if (demanded > 0 && memory_.free() < demanded + FrameMemory::bytes_of(run, first_page, pages)) return nullptr;
  bool fragmented = false;
  Frame* frame = frames_.try_make(run, first_page, pages, false, false, fragmented);
  if (!frame && fragmented && !memory_.joins_holes() &&
      clear_window(FrameMemory::bytes_of(run, first_page, pages), before, true, lock)) {
    frame = frames_.try_make(run, first_page, pages, false, false, fragmented);
  }
  while (!frame && fragmented && memory_.joins_holes()) {  // the free bytes are fewer than what can be joined
    Frame* const victim = frames_.victims().best(timeline_.now(), before);
    if (!victim || Frames::is_dirty(*victim)) break;
    frames_.evict(*victim);
    frame = frames_.try_make(run, first_page, pages, false, false, fragmented);
  }
  return frame;
}

void Room::empty(Lock& lock) {
  const std::size_t failed_before = transfers_.failed_writes();
  while (true) {
    if (Frame* victim = frames_.victims().best(timeline_.now())) {
      Frames::is_dirty(*victim) ? void(transfers_.write_back(lock, *victim, Priority::demanded))
                                : frames_.evict(*victim);
    } else if (transfers_.writing_bytes() > 0) {
      const std::size_t writing = transfers_.writing_bytes();
      transfers_.wait_until(lock, [&] { return transfers_.writing_bytes() != writing; }, Cause::memory);
    } else {
      return;
    }
    transfers_.throw_failed_write(failed_before);
  }
}

void Room::give_up_frames(Lock& lock, Run& run) {
  for (Page& page : run.pages) {
    while (page.frame && page.frame->pins == 0) {
      Frame& frame = *page.frame;
      if (frame.transfers > 0) {
        transfers_.wait_for_reads(lock, frame);
        transfers_.wait_until(lock, [&] { return page.frame != &frame || frame.transfers == 0; }, Cause::memory);
      } else if (Frames::is_dirty(frame)) {
        const std::size_t failed_before = transfers_.failed_writes();
        transfers_.write_back(lock, frame, Priority::demanded);
        transfers_.wait_until(lock, [&] { return page.frame != &frame || frame.transfers == 0; }, Cause::memory);
        transfers_.throw_failed_write(failed_before);
      } else {
        frames_.evict(frame);
      }
    }
  }
}

/// Evicts neighbouring frames that make `bytes` together with the holes between them. True if the caller should look
/// again: frames have left, or are being written.
bool Room::clear_window(std::size_t bytes, AccessPlan::Time before, bool clean_only, Lock& lock) {
  const auto frames = memory_.window(bytes, [&](const Frame& frame) {
    return frame.cost >= 0 && frame.next_use > before && (!clean_only || !Frames::is_dirty(frame));
  });
  std::vector<Frame*> dirty;
  for (Frame* frame : frames) Frames::is_dirty(*frame) ? dirty.push_back(frame) : frames_.evict(*frame);
  const bool blocks = transfers_.blocks();
  for (Frame* frame : dirty) {
    transfers_.write_back(lock, *frame, Priority::demanded);
    if (blocks) break;  // the lock was given up: other threads may have moved frames
  }
  return !frames.empty();
}

void Room::clean_behind(Lock& lock) noexcept {
  const std::size_t limit = memory_.budget().limit();
  if (timeline_.plan().knows() || frames_.is_gathered() || transfers_.has_failed_write() ||
      memory_.free() > limit / 2)
    return;
  try {
    while (frames_.victims().bytes(1) + transfers_.writing_bytes() < limit / kBehindShare) {
      Frame* const victim = frames_.victims().first(2);
      if (!victim || !transfers_.write_back(lock, *victim, Priority::behind) || transfers_.has_failed_write()) return;
    }
  } catch (...) {
    // The write starts again when its memory is needed, and throws its error then.
  }
}

}  // namespace zeropage
