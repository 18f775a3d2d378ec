// The frames of one cache: their pins, what becomes of one that nothing uses any more, and in which order they leave.
// It moves no bytes, and knows neither homes nor transfers; whether a frame is clean is read in its pages.
//
// Contract: under the cache's lock; it never waits. A frame with a pin or a transfer stays. Without either it is
// dropped if its content is of no use, and else stands among the victims until memory is short. Permanent frames,
// which are homes, do neither.
#pragma once

#include <utility>
#include <vector>

#include "zeropage/pager/budgets.h"
#include "zeropage/pager/frame_memory.h"
#include "zeropage/pager/monitor.h"
#include "zeropage/pager/timeline.h"
#include "zeropage/pager/victim_queue.h"

namespace zeropage {

/// How far along the plan ReadAhead has looked. Where a frame leaves that is used before, it looks again.
struct LookedAhead {
  AccessPlan::Time reached = 0;  // up to here everything was looked at
  bool again = false;            // from where the program is
};

class Frames {
 public:
  Frames(Monitor& monitor, FrameMemory& memory, Budgets& budgets, const Timeline& timeline, bool gathered)
      : monitor_(monitor), memory_(memory), budgets_(budgets), timeline_(timeline), gathered_(gathered) {}

  /// A frame with one pin of this thread; null as FrameMemory says.
  Frame* try_make(Run& run, std::size_t first_page, std::size_t pages, bool permanent, bool& fragmented);
  void add_pin(Frame& frame);
  /// `thread` is the one that took the pin: what it holds, and others do not, decides whether others are waited for.
  void drop_pin(Frame& frame, std::uint64_t thread = this_thread_number()) noexcept;
  std::size_t pins() const { return pins_; }
  std::size_t pins_of_this_thread() const;

  static bool is_dirty(const Frame& frame);
  static bool is_reading(const Frame& frame);
  /// An operator does this to a page that has a frame.
  static void mark(Run& run, std::size_t page, Access access) {
    if (access == Access::read) return;
    ++run.changes;
    if (run.next) run.pages[page].is_new = true;
    Residency& state = run.pages[page].state;
    state = state == Residency::writing || state == Residency::rewritten ? Residency::rewritten : Residency::dirty;
  }

  // [Note: overwriting] The cache does not read a page that an operator is to overwrite: until the operator has
  // written it, its frame holds other bytes. The frame remembers the page's state before. If the operator fails, the
  // page has that state again when the frame's last pin goes. An open version (versions.h) is discarded as a whole
  // instead.

  /// Remembers the state of a page that has no content in its frame and is about to be overwritten.
  static void promise(Run& run, std::size_t page);
  /// Forgets it: the operator has written the page.
  static void keep_promise(Frame& frame, std::size_t page);

  /// Of a frame that no pin and no transfer holds any more.
  void settle(Frame& frame) noexcept;
  /// Forgets a frame; its pages must not need it.
  void drop(Frame& frame) noexcept;
  /// Of a clean frame that nothing uses.
  void evict(Frame& frame);
  /// Of a frame whose content is of no interest: its pages are what they are at home.
  void give_up(Frame& frame);
  /// Its pages have no frame from now on. The frame stays.
  static void forget(const Frame& frame) noexcept;
  /// Of a closed cache: what no operator holds.
  void drop_unused() noexcept;

  /// Where the plan is another one, what leaves next is too.
  void plan_anew();
  const VictimQueue& victims() const { return victims_; }
  std::size_t evictions() const { return evictions_; }

  /// The frame is read ahead, for a use at that time in the plan. As long as the plan holds it leaves for no page
  /// that is used later than that, whatever else is known of its next use: pages would take turns in leaving for each
  /// other.
  void set_ahead(Frame& frame, AccessPlan::Time time);
  /// Read ahead, and not used yet.
  std::size_t ahead_bytes() const { return ahead_bytes_; }
  LookedAhead& looked_ahead() { return looked_ahead_; }

  /// Whether they are of gathered tensors ([Note: gathered] in frame_cache.h).
  bool is_gathered() const { return gathered_; }

 private:
  using ThreadPins = std::pair<std::uint64_t, std::size_t>;

  /// Gives the pages that no operator has written their states of before. The frame has no pin.
  static void break_promises(Frame& frame) noexcept;
  void count_pin();
  void consider(Frame& frame) noexcept;

  Monitor& monitor_;
  FrameMemory& memory_;
  Budgets& budgets_;
  const Timeline& timeline_;
  const bool gathered_;
  VictimQueue victims_;
  std::uint64_t planned_at_ = 0;  // surprises when victims were last ordered
  std::uint64_t uses_when_planned_ = 0;
  std::size_t pins_ = 0;
  std::vector<ThreadPins> thread_pins_;  // of them, by the thread that took them; no zeros
  std::size_t ahead_bytes_ = 0;
  LookedAhead looked_ahead_;
  std::size_t evictions_ = 0;
};

}  // namespace zeropage
