#include "zeropage/base/booked_time.h"

#include <new>

#include "zeropage/base/current_activity.h"
#include "zeropage/base/trace.h"

namespace zeropage {
namespace {

/// Whether time inside `outer` stays with it: a checkpoint's reads are the checkpoint's, an update's operators are
/// the update's, and a wait for an upload is not also one for the device.
bool absorbs(Spent outer, Spent inner) {
  if (outer == Spent::checkpoint || outer == inner) return true;
  if (outer == Spent::updates) return inner == Spent::operators || inner == Spent::copies || inner == Spent::overhead;
  return is_wait(outer) && (inner == Spent::device || inner == Spent::ranks || inner == Spent::threads);
}

}  // namespace

std::string_view name_of(Spent spent) {
  static constexpr std::string_view names[kSpent] = {"disk",    "upload", "all-gather",    "memory",
                                                     "device",  "ranks",  "other threads", "checkpoint",
                                                     "updates", "copies", "overhead",      "operators"};
  return names[static_cast<int>(spent)];
}

BookedTime& BookedTime::of_no_space() {
  static BookedTime book;
  return book;
}

BookedTime::Seconds BookedTime::seconds() const {
  Seconds seconds{};
  for (int i = 0; i < kSpent; ++i) {
    const Clock::duration sum(sums_[i].load(std::memory_order_relaxed));
    seconds[i] = std::chrono::duration<double>(sum).count();
  }
  return seconds;
}

Booking::Booking(BookedTime* book, Spent spent) : spent_(spent) {
  if (unbooked_ > 0) return;
  if (!book) book = innermost_ ? innermost_->book_ : nullptr;
  if (!book || (innermost_ && absorbs(innermost_->spent_, spent))) return;
  book_ = book;
  outer_ = innermost_;
  since_ = Clock::now();
  if (outer_) outer_->add(since_);
  innermost_ = this;
}

void Booking::close() noexcept {
  const auto now = Clock::now();
  add(now);
  innermost_ = outer_;
  if (outer_) outer_->since_ = now;
}

/// Adds the time since it last ran.
void Booking::add(Clock::time_point until) noexcept {
  book_->add(spent_, until - since_);
  if (!is_wait(spent_) || !Trace::is_on()) return;
  try {
    Trace::span("wait", name_of(spent_), since_, until, Trace::arg("operator", CurrentActivity::now("none")));
  } catch (const std::bad_alloc&) {  // an event is lost
  }
}

}  // namespace zeropage
