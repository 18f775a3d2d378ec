#include "zeropage/pager/room.h"

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

/// How much is written behind where no plan says what leaves next.
constexpr std::size_t kBehindShare = 4;  // a quarter of memory
/// For memory that other threads have pinned.
constexpr std::chrono::seconds kLongestWait{5};
/// Meanwhile other threads' transfers to and from a device end without a word.
constexpr std::chrono::milliseconds kUntilTidied{5};

/// While it lives a thread is owed the memory that it frees.
struct Demand {
  explicit Demand(int& demands) : count(demands) { ++count; }
  ~Demand() { --count; }
  Demand(const Demand&) = delete;
  Demand& operator=(const Demand&) = delete;
  int& count;
};

}  // namespace

Frame& Room::make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages, bool permanent) {
  const Demand demand(demands_);
  const std::size_t failed_before = transfers_.failed_writes();
  const std::size_t bytes = FrameMemory::bytes_of(run, first_page, pages);
  if (bytes > memory_.budget().limit()) throw Shortage{};
  bool clearing = false;  // neighbours are being written
  Clock::time_point give_up_at;
  while (true) {
    monitor_.check_usable();
    bool fragmented = false;
    if (Frame* frame = frames_.try_make(run, first_page, pages, permanent, fragmented)) return *frame;
    const bool needs_window = fragmented && !memory_.joins_holes();
    if (transfers_.failed_writes() != failed_before && transfers_.has_failed_write()) {
      Frame* clean = frames_.victims().best_clean([](const Frame& f) { return !Frames::is_dirty(f); });
      if (clean && !needs_window) {
        frames_.evict(*clean);
        continue;
      }
      transfers_.throw_failed_write();
    }
    frames_.plan_anew();
    const bool enough =
        !fragmented && transfers_.writing_bytes() > 0 && memory_.free() + transfers_.writing_bytes() >= bytes;
    if (needs_window) {
      // What is clean and is used soon stays, if something else can be written.
      const AccessPlan::Time soon = timeline_.now() + memory_.budget().limit() / 2;
      if (clear_window(bytes, soon, /*clean_only=*/true, lock)) continue;
      if ((!clearing || transfers_.writing_bytes() == 0) && clear_window(bytes, 0, false, lock)) {
        clearing = true;
        continue;
      }
      clearing = false;
    } else if (Frame* victim = frames_.victims().best(timeline_.now())) {
      if (!Frames::is_dirty(*victim)) {
        frames_.evict(*victim);
        continue;
      }
      // It must be written first. What is clean and is not used soon leaves instead of being waited for.
      Frame* clean = frames_.victims().best_clean([](const Frame& f) { return !Frames::is_dirty(f); });
      const bool leaves = clean && clean->next_use > timeline_.now() + memory_.budget().limit() / 2;
      if (leaves) frames_.evict(*clean);
      if (!enough) transfers_.write_back(lock, *victim, Priority::demanded);
      if (leaves || !enough) continue;
    }
    if (frames_.is_gathered() && transfers_.reading_bytes() > 0) {  // a gather ends when it is waited for
      const auto& frames = memory_.frames();
      Frame* first = nullptr;  // in an order that is the same on all ranks
      const auto key = [](const Frame& f) { return std::pair(f.run ? f.run->number : 0, f.first_page); };
      for (const auto& [_, frame] : frames) {
        if (!Frames::is_reading(*frame)) continue;
        if (!first || key(*frame) < key(*first)) first = frame.get();
      }
      if (first) {
        transfers_.wait_for_reads(lock, *first);
        continue;
      }
    }
    if (transfers_.writing_bytes() > 0 || transfers_.reading_bytes() > 0) {
      // Until one of them has ended, or, where neighbours must leave together, all.
      const std::size_t writing = transfers_.writing_bytes(), reading = transfers_.reading_bytes(),
                        queued = frames_.victims().size();
      const auto is_another = [&] {
        if (needs_window && writing > 0) return transfers_.writing_bytes() == 0;
        return transfers_.writing_bytes() != writing || transfers_.reading_bytes() != reading ||
               frames_.victims().size() != queued;
      };
      transfers_.wait_until(lock, is_another, Cause::memory);
      continue;
    }
    if (upper_.connected()) {  // transfers of the cache above hold pages here, and may have ended without a word
      const std::size_t pins = frames_.pins(), queued = frames_.victims().size(), free = memory_.free();
      bool ended = false;
      {
        const Unlocked unlocked(lock);
        ended = upper_.tidy();
      }
      // Other threads may have let go of frames, or begun to write them, while this one had no lock.
      if (ended || frames_.pins() != pins || frames_.victims().size() != queued || memory_.free() != free ||
          transfers_.writing_bytes() > 0 || transfers_.reading_bytes() > 0)
        continue;
    }
    // ShardedHome frees what its gathers hold when it is refused.
    if ((!upper_.serves() || upper_.connected()) && frames_.pins() > frames_.pins_of_this_thread()) {
      // What other threads hold they let go of, unless they wait for this one: that is found out by waiting long.
      const auto now = Clock::now();
      if (give_up_at == decltype(give_up_at){}) give_up_at = now + kLongestWait;
      const auto until = upper_.connected() ? std::min(give_up_at, now + kUntilTidied) : give_up_at;
      const std::size_t pins = frames_.pins(), queued = frames_.victims().size();
      const Waiting waiting(monitor_, Cause::memory);
      const bool more = monitor_.changed().wait_until(lock, until, [&] {
        return frames_.pins() < pins || frames_.victims().size() > queued || monitor_.closed();
      });
      if (frames_.victims().size() > queued) give_up_at = {};
      if (more || until < give_up_at) continue;
    }
    throw Shortage{};
  }
}

Frame* Room::try_make_frame(Lock& lock, Run& run, std::size_t first_page, std::size_t pages,
                            AccessPlan::Time before) {
  if (is_demanded()) return nullptr;
  bool fragmented = false;
  Frame* frame = frames_.try_make(run, first_page, pages, false, fragmented);
  if (!frame && fragmented && !memory_.joins_holes() &&
      clear_window(FrameMemory::bytes_of(run, first_page, pages), before, true, lock)) {
    frame = frames_.try_make(run, first_page, pages, false, fragmented);
  }
  while (!frame && fragmented && memory_.joins_holes()) {  // what is free is less than the pieces that can be joined
    Frame* const victim = frames_.victims().best(timeline_.now(), before);
    if (!victim || Frames::is_dirty(*victim)) break;
    frames_.evict(*victim);
    frame = frames_.try_make(run, first_page, pages, false, fragmented);
  }
  return frame;
}

void Room::empty(Lock& lock) {
  const Demand demand(demands_);
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

/// Evicts neighbours that together with the holes between them make `bytes`. True if there is something new to look
/// at: they have left, or are being written.
bool Room::clear_window(std::size_t bytes, AccessPlan::Time before, bool clean_only, Lock& lock) {
  const auto frames = memory_.window(bytes, [&](const Frame& frame) {
    return frame.cost >= 0 && frame.next_use > before && (!clean_only || !Frames::is_dirty(frame));
  });
  std::vector<Frame*> dirty;
  for (Frame* frame : frames) Frames::is_dirty(*frame) ? dirty.push_back(frame) : frames_.evict(*frame);
  const bool blocks = transfers_.blocks();
  for (Frame* frame : dirty) {
    transfers_.write_back(lock, *frame, Priority::demanded);
    if (blocks) break;  // the lock was given up: what lies where has to be looked at anew
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
    // What could not start behind starts again when its memory is needed, and its error is told then.
  }
}

}  // namespace zeropage
