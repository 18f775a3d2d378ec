// What will be taken next: the history of segments that operators took whole, and the place in it where the same had
// come before. There is no notion of an iteration: forward, backward and recomputation are found where they repeat.
// A wrong guess costs reads that nobody needed, never an error. Thread-safe.
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include "zeropage/page/page.h"

namespace zeropage {

class Foresight {
 public:
  /// An operator took `segment` whole. The same one again, with no other in between, counts as once.
  void visit(Segment& segment);
  /// It died.
  void forget(const Segment& segment);
  /// Calls `see` for the latest segment, then for what comes next if what was repeats itself, nearest first, until it
  /// returns false. No segment dies meanwhile. Nothing is seen where the latest two visits never came in this order.
  void for_each_coming(const std::function<bool(Segment&)>& see) const;

 private:
  static constexpr std::size_t kMostVisits = std::size_t{1} << 16;
  static constexpr std::size_t kLongestContext = 16, kShortestContext = 2;
  static constexpr std::size_t kNowhere = ~std::size_t{0};

  std::size_t longest_match() const;

  mutable std::mutex mutex_;
  std::vector<Segment*> history_;  // null: it died
  std::size_t match_ = kNowhere;   // where the latest visit came earlier, after the same visits as now
};

}  // namespace zeropage
