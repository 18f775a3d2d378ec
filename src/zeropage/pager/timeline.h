// How far the program has come: the plan of what it uses, and the time in it. It decides nothing: reading ahead and
// the order of victims follow from it. The cache's lock guards it.
#pragma once

#include <algorithm>
#include <span>

#include "zeropage/base/errors.h"
#include "zeropage/pager/access_plan.h"

namespace zeropage {

/// The segment has a second version that another thread writes, or wrote: it must be committed or discarded first.
class VersionOpen : public AccessError {
 public:
  VersionOpen()
      : AccessError("a tensor is used by this thread while backward on another one updates it ahead of the step") {}
};

class Timeline {
 public:
  /// Whether a use of these tells anything: one may leave memory.
  static bool has_uses(std::span<const PinRequest> requests) {
    return std::any_of(requests.begin(), requests.end(), [](auto& r) { return !r.segment->is_always_in_memory(); });
  }
  /// The program uses these now, whole, or page by page and taking turns. True if that was not planned.
  /// `seconds`: that it has worked until now, without its waits.
  bool record_use(std::span<const PinRequest> requests, bool whole, double seconds);
  /// Where the program is, when it takes a page of those that it goes through.
  void note_page(Run& run, std::size_t index) {
    if (run.stream_page > index) return;
    run.stream_page = index + 1 == run.pages.size() ? ~std::size_t{0} : index + 1;
    if (run.stream_use <= plan_.latest_group()) return;
    now_ = std::max(now_, AccessPlan::time_of_page(run.stream_begin, run.stream_end, index, run.pages.size()));
  }

  AccessPlan& plan() { return plan_; }
  const AccessPlan& plan() const { return plan_; }
  /// When the latest use began.
  double seconds() const { return seconds_; }
  /// In the plan, and within a group whose pages are gone through.
  AccessPlan::Time now() const { return now_; }

 private:
  AccessPlan plan_;
  AccessPlan::Time now_ = 0;
  double seconds_ = 0;
};

}  // namespace zeropage
