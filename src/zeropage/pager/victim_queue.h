// Which frame leaves next. Frames that could leave are ordered by their next use; the one to leave spares the fewest
// transfers for the time that it would stay. A frame's cost is 2 if it must be written and will be read again, 1 if
// one of these, 0 if it will be overwritten before it is read, and is the same at home.
//
// O(log n) an operation. The cache's lock guards it.
#pragma once

#include <array>
#include <functional>
#include <set>

#include "zeropage/pager/access_plan.h"

namespace zeropage {

class VictimQueue {
 public:
  /// Frames with no planned use are ordered by their last one, later than all planned ones.
  static AccessPlan::Time unplanned(AccessPlan::Time last_use) { return AccessPlan::kNever - 1 - last_use / 2; }
  static bool is_planned(AccessPlan::Time next_use) { return next_use < AccessPlan::kNever / 2; }

  /// Neither allocates: a frame brings its place along.
  void insert(Frame& frame, AccessPlan::Time next_use, int cost) noexcept;
  void remove(Frame& frame) noexcept;
  /// Of those whose next use is later than `after`. Null if there is none.
  Frame* best(AccessPlan::Time now, AccessPlan::Time after = 0) const;
  /// Bytes of frames that `counts` counts and that leave before `frame`. At least `enough` if they are more than a
  /// few: no more are looked at.
  std::size_t bytes_before(const Frame& frame, AccessPlan::Time now, std::size_t enough,
                           const std::function<bool(const Frame&)>& counts) const;
  /// Of those that cost no write. `clean` says which frames of cost 1 do not.
  Frame* best_clean(const std::function<bool(const Frame&)>& clean) const;
  /// The first to leave of one cost, or null; and the bytes of all.
  Frame* first(int cost) const { return frames_[cost].empty() ? nullptr : *frames_[cost].begin(); }
  std::size_t bytes(int cost) const { return bytes_[cost]; }
  std::size_t size() const { return frames_[0].size() + frames_[1].size() + frames_[2].size(); }
  /// Calls `visit` for all, in no order.
  void for_each(const std::function<void(Frame&)>& visit) const;

 private:
  static double worth_of_leaving(const Frame& frame, AccessPlan::Time now);
  struct Later {
    bool operator()(const Frame* a, const Frame* b) const {
      // Equal frames leave in an order that is the same on all ranks; addresses are not.
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
