// The program's progress: the plan of its uses, and the time in that plan. It decides nothing; prefetching and the
// order of victims follow from it. The cache's lock guards it.
#pragma once

#include <algorithm>
#include <span>

#include "zeropage/base/errors.h"
#include "zeropage/pager/foresight/access_plan.h"

namespace zeropage {

/// Thrown for a segment with a second version of another thread, which must be committed or discarded first.
class VersionOpen : public AccessError {
 public:
  VersionOpen()
      : AccessError("a tensor is used by this thread while backward on another one updates it ahead of the step") {}
};

class Timeline {
 public:
  /// Whether these uses matter to the plan: at least one segment may leave memory.
  static bool has_uses(std::span<const PinRequest> requests) {
    return std::any_of(requests.begin(), requests.end(), [](auto& r) { return !r.segment->is_always_in_memory(); });
  }
  /// Records that the program uses these now: whole, or page by page in turns. True if the plan did not expect it.
  /// `seconds`: the program's time so far without its waits.
  bool record_use(std::span<const PinRequest> requests, bool whole, double seconds);
  /// Updates the program's position when it takes a page of a stream.
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
  /// Time in the plan, and within a group whose pages are streamed.
  AccessPlan::Time now() const { return now_; }

 private:
  AccessPlan plan_;
  AccessPlan::Time now_ = 0;
  double seconds_ = 0;
};

}  // namespace zeropage
