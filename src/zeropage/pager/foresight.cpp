#include "zeropage/pager/foresight.h"

#include <algorithm>

namespace zeropage {

void Foresight::visit(Segment& segment) {
  std::lock_guard lock(mutex_);
  if (!history_.empty() && history_.back() == &segment) return;
  if (history_.size() == kMostVisits) {
    history_.erase(history_.begin(), history_.begin() + kMostVisits / 2);
    match_ = match_ == kNowhere || match_ < kMostVisits / 2 ? kNowhere : match_ - kMostVisits / 2;
  }
  history_.push_back(&segment);
  // In a program that repeats itself, the next visit is the one that followed last time.
  match_ = match_ != kNowhere && history_[match_ + 1] == &segment ? match_ + 1 : longest_match();
}

/// The latest earlier place that was reached over the longest way we came by.
std::size_t Foresight::longest_match() const {
  const std::size_t latest = history_.size() - 1;
  std::size_t best = kNowhere, best_length = kShortestContext - 1;
  for (std::size_t place = latest; place-- > 0 && best_length < kLongestContext;) {
    std::size_t length = 0;
    while (length < kLongestContext && length <= place && history_[place - length] &&
           history_[place - length] == history_[latest - length]) {
      ++length;
    }
    if (length > best_length) best = place, best_length = length;
  }
  return best;
}

void Foresight::forget(const Segment& segment) {
  std::lock_guard lock(mutex_);
  std::replace(history_.begin(), history_.end(), const_cast<Segment*>(&segment), static_cast<Segment*>(nullptr));
}

void Foresight::for_each_coming(const std::function<bool(Segment&)>& see) const {
  std::lock_guard lock(mutex_);
  if (match_ == kNowhere) return;
  for (std::size_t i = match_; i + 1 < history_.size(); ++i) {
    if (history_[i] && !see(*history_[i])) return;
  }
}

}  // namespace zeropage
