#include "zeropage/base/waits.h"

#include <mutex>

#include "zeropage/base/process.h"

namespace zeropage {
namespace {

std::mutex listed_mutex;
ListedWait* latest_listed = nullptr;
std::uint64_t listed_so_far = 0;
const std::uint64_t listing_process = process_generation();

/// False in a forked child: it has one thread, and another may have held the list. False in planned runs, whose clock
/// differs from the watching thread's.
bool lists() { return listing_process == process_generation() && !VirtualClock::current(); }

}  // namespace

ListedWait::ListedWait(std::string_view what, std::string_view details) : what_(what), details_(details) {
  if (!lists()) return;
  std::lock_guard lock(listed_mutex);
  number_ = ++listed_so_far;
  before_ = latest_listed;
  if (before_) before_->after_ = this;
  latest_listed = this;
}

ListedWait::~ListedWait() {
  if (number_ == 0 || listing_process != process_generation()) return;
  std::lock_guard lock(listed_mutex);
  (after_ ? after_->before_ : latest_listed) = before_;
  if (before_) before_->after_ = after_;
}

std::vector<LongWait> LongWait::under_way(double seconds) {
  std::vector<LongWait> found;
  if (!lists()) return found;
  const auto now = Clock::now();
  std::lock_guard lock(listed_mutex);
  for (const ListedWait* wait = latest_listed; wait; wait = wait->before_) {
    const double waited = std::chrono::duration<double>(now - wait->since_).count();
    if (waited < seconds) continue;
    found.push_back({wait->number_, std::string(wait->what_), std::string(wait->details_),
                     wait->activity_ ? wait->activity_->describe() : std::string(), waited});
  }
  return found;
}

}  // namespace zeropage
