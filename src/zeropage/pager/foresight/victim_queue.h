// Chooses the next frame to evict. Frames are ordered by their next use. The victim causes the fewest transfers for
// the time that it would otherwise stay. A frame costs one transfer if it must be written, and one if it will be read
// before it is overwritten: 0 to 2 in all.
//
// O(log n) an operation. The cache's lock guards it.
#pragma once

#include <array>
#include <functional>
#include <set>

#include "zeropage/pager/foresight/access_plan.h"

namespace zeropage {

class VictimQueue {
 public:
  /// Frames with no planned use are ordered by their last one, later than all planned ones.
  static AccessPlan::Time unplanned(AccessPlan::Time last_use) { return AccessPlan::kNever - 1 - last_use / 2; }
  static bool is_planned(AccessPlan::Time next_use) { return next_use < AccessPlan::kNever / 2; }

  /// Neither call allocates: a frame carries its own node.
  void insert(Frame& frame, AccessPlan::Time next_use, int cost) noexcept;
  void remove(Frame& frame) noexcept;
  /// The best victim among frames whose next use is later than `after`. Null if there is none.
  Frame* best(AccessPlan::Time now, AccessPlan::Time after = 0) const;
  /// Bytes of frames that leave before `frame` and that `counts` accepts. At least `enough` if more than a few leave
  /// before: it looks at no more.
  std::size_t bytes_before(const Frame& frame, AccessPlan::Time now, std::size_t enough,
                           const std::function<bool(const Frame&)>& counts) const;
  /// The best victim that needs no write. `clean` tells which frames of cost 1 need none.
  Frame* best_clean(const std::function<bool(const Frame&)>& clean) const;
  /// The first victim of one cost, or null; and the bytes of all of them.
  Frame* first(int cost) const { return frames_[cost].empty() ? nullptr : *frames_[cost].begin(); }
  std::size_t bytes(int cost) const { return bytes_[cost]; }
  std::size_t size() const { return frames_[0].size() + frames_[1].size() + frames_[2].size(); }
  /// Calls `visit` for all, in no order.
  void for_each(const std::function<void(Frame&)>& visit) const;

 private:
  static double worth_of_leaving(const Frame& frame, AccessPlan::Time now);
  struct Later {
    bool operator()(const Frame* a, const Frame* b) const {
      // Equal frames leave in the same order on all ranks, so addresses must not decide.
      if (a->next_use != b->next_use) return a->next_use > b->next_use;
      if (a->ordinal != b->ordinal) return a->ordinal < b->ordinal;
      if (a->first_page != b->first_page) return a->first_page < b->first_page;
      return a->number < b->number;
    }
  };
  std::array<std::set<Frame*, Later>, 3> frames_;  // by cost
  std::array<std::size_t, 3> bytes_{};
};

}  // namespace zeropage
