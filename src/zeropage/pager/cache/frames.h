// The frames of one cache: their pins, what happens to an unused frame, and the order in which frames leave. It moves
// no bytes and knows neither homes nor transfers. It reads a frame's pages to see whether the frame is clean.
//
// Contract: under the cache's lock; it never waits. A frame with a pin or a transfer stays. A frame without either is
// dropped if its content is of no use. Otherwise it is queued as a victim until memory is short. Permanent frames are
// homes: they are neither dropped nor queued.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "zeropage/pager/cache/budgets.h"
#include "zeropage/pager/cache/frame_memory.h"
#include "zeropage/pager/cache/monitor.h"
#include "zeropage/pager/foresight/timeline.h"
#include "zeropage/pager/foresight/victim_queue.h"

namespace zeropage {

/// ReadAhead's scan position in the plan. It scans again if a frame leaves whose next use is earlier.
struct LookedAhead {
  AccessPlan::Time reached = 0;  // every use before this has been looked at
  bool again = false;            // scan again, from the program's position
};

class Frames {
 public:
  Frames(Monitor& monitor, FrameMemory& memory, Budgets& budgets, const Timeline& timeline, bool gathered)
      : monitor_(monitor), memory_(memory), budgets_(budgets), timeline_(timeline), gathered_(gathered) {}

  /// A frame with one pin of this thread; null in the cases of FrameMemory::try_make().
  Frame* try_make(Run& run, std::size_t first_page, std::size_t pages, bool for_long, bool must, bool& fragmented);
  void add_pin(Frame& frame);
  /// `thread` is the one that took the pin. Whether others hold pins decides whether a thread waits for them.
  void drop_pin(Frame& frame, std::uint64_t thread = this_thread_number()) noexcept;
  std::size_t pins() const { return pins_; }
  /// Pins whose holders wait for nothing, among them.
  std::size_t brief_pins() const { return brief_pins_; }
  void count_brief(bool begins) { brief_pins_ += begins ? 1 : -1; }
  /// Bytes of frames that are pinned and may leave memory otherwise.
  std::size_t pinned_bytes() const { return pinned_bytes_; }

  /// One thread's part in the use of memory.
  struct ThreadUse {
    std::uint64_t thread;
    std::size_t pins = 0;     // It took them.
    std::size_t lasting = 0;  // Those of them that last while the program does other things.
    std::size_t pinned = 0;   // Bytes of frames whose first pin it took.
    std::size_t claimed = 0;  // Bytes that it may pin without waiting for other threads' pins.
    std::size_t before = 0;   // Bytes that it had pinned when it claimed.
    std::size_t beyond = 0;   // Bytes that it was granted and has pinned beyond its claim.
    std::size_t spent() const { return pinned - std::min(pinned, before + beyond); }
    std::size_t unspent() const { return claimed - std::min(claimed, spent()); }
  };
  /// Threads with a pin or a claim.
  const std::vector<ThreadUse>& uses() const { return uses_; }
  /// This thread's entry; all zeros if it uses nothing.
  ThreadUse use_of_this_thread() const;
  /// Changes this thread's claimed bytes or lasting pins.
  void claim(std::size_t bytes);
  void end_claim(std::size_t bytes, std::uint64_t thread) noexcept;
  /// The same for a claim that was spent on frames which stay pinned.
  void end_spent_claim(std::size_t bytes) noexcept;
  void count_lasting(std::size_t pins);
  void end_lasting(std::size_t pins, std::uint64_t thread) noexcept;

  static bool is_dirty(const Frame& frame);
  static bool is_reading(const Frame& frame);
  /// Records that an operator accesses a page that has a frame.
  static void mark(Run& run, std::size_t page, Access access) {
    if (access == Access::read) return;
    ++run.changes;
    if (run.has_version) run.pages[page].is_new = true;
    Residency& state = run.pages[page].state;
    state = state == Residency::writing || state == Residency::rewritten ? Residency::rewritten : Residency::dirty;
  }

  // [Note: overwriting] The cache does not read a page that an operator is to overwrite. Until the operator has
  // written it, its frame holds other bytes. The frame remembers the page's earlier state. If the operator fails, the
  // page returns to that state with the frame's last pin. An open version (versions.h) is discarded as a whole
  // instead.

  /// Remembers the state of a page that is about to be overwritten and has no content in its frame.
  static void promise(Run& run, std::size_t page);
  /// Returns that state, or `clean` if no overwrite is under way.
  static Residency state_before_overwrite(const Frame& frame, std::size_t page) {
    return frame.promised.empty() ? Residency::clean : frame.promised[page - frame.first_page];
  }
  /// Forgets that state: the operator has written the page.
  static void keep_promise(Frame& frame, std::size_t page);

  /// Makes a pinned frame its run's home, or ends that.
  void set_permanent(Frame& frame, bool permanent) noexcept;
  /// To be called before the pin of an operator that failed is dropped. If other threads hold the frame, no more pins
  /// are taken until its pages have their earlier states again.
  static void begin_to_revert(Frame& frame) {
    frame.reverting = std::ranges::any_of(frame.promised, [](Residency r) { return r != Residency::clean; });
  }
  /// Drops or queues a frame without a pin or transfer.
  void settle(Frame& frame) noexcept;
  /// Deletes a frame that its pages do not need.
  void drop(Frame& frame) noexcept;
  /// Evicts a clean frame that nothing uses.
  void evict(Frame& frame);
  /// Drops a frame and its content: its pages keep their home content.
  void give_up(Frame& frame);
  /// Detaches its pages from the frame. The frame stays.
  static void forget(const Frame& frame) noexcept;
  /// After close(): drops the frames that no operator holds.
  void drop_unused() noexcept;

  /// Orders the victims anew if the plan has changed.
  void plan_anew();
  /// The same for the run's frames alone.
  void plan_anew(const Run& run) noexcept;
  const VictimQueue& victims() const { return victims_; }
  std::size_t evictions() const { return evictions_; }

  /// Marks the frame as read ahead, for a use at that time in the plan. As long as the plan holds, it leaves for no
  /// page that is used later, whatever else is known of its next use. Otherwise pages would take turns in evicting
  /// each other.
  void set_ahead(Frame& frame, AccessPlan::Time time);
  /// Bytes of frames read ahead and not used yet.
  std::size_t ahead_bytes() const { return ahead_bytes_; }
  LookedAhead& looked_ahead() { return looked_ahead_; }

  /// Whether this is the cache of gathered tensors ([Note: gathered] in frame_cache.h).
  bool is_gathered() const { return gathered_; }
  /// Whether operators hold all these gathered tensors whole already, as in a module whose parts run on different
  /// ranks. An operator that uses them there may run on one rank only, so the plan must not know of it.
  bool is_of_one_rank(std::span<const PinRequest> requests) const;
  bool is_of_one_rank(const Run& run) const;

 private:
  /// Restores the earlier states of pages that no operator has written. The frame has no pin.
  static void break_promises(Frame& frame) noexcept;
  void count_pin(ThreadUse& use, Frame& frame, bool is_first) noexcept;
  void count_bytes(const Frame& frame) noexcept;
  void uncount_bytes(const Frame& frame) noexcept;
  ThreadUse& entry_of_this_thread();
  ThreadUse* find_use(std::uint64_t thread) noexcept;
  void drop_if_unused(ThreadUse& use) noexcept;
  void consider(Frame& frame) noexcept;

  Monitor& monitor_;
  FrameMemory& memory_;
  Budgets& budgets_;
  const Timeline& timeline_;
  const bool gathered_;
  VictimQueue victims_;
  std::uint64_t planned_at_ = 0;  // surprises when the victims were last ordered
  std::uint64_t uses_when_planned_ = 0;
  std::size_t pins_ = 0, brief_pins_ = 0, pinned_bytes_ = 0;
  std::vector<ThreadUse> uses_;
  std::size_t ahead_bytes_ = 0;
  LookedAhead looked_ahead_;
  std::size_t evictions_ = 0;
};

}  // namespace zeropage
