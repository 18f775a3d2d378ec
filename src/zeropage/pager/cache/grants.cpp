#include "zeropage/pager/cache/grants.h"

#include <fmt/format.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

/// How often a thread looks for ended transfers to and from a device, which signal nothing.
constexpr std::chrono::milliseconds kUntilTidied{5};

}  // namespace

std::size_t Grants::unspent() const {
  std::size_t sum = 0;
  for (const auto& use : frames_.uses()) sum += use.unspent();
  return sum;
}

/// The bytes that the thread has not claimed yet.
std::size_t Grants::beyond_claim(const Need& need) const {
  return need.bytes - std::min(need.bytes, frames_.use_of_this_thread().unspent());
}

bool Grants::fits_beside_others(const Need& need) const {
  if (need.held > 0 && !budgets_.can_hold(need.held)) return false;
  const std::size_t more = beyond_claim(need);
  return more == 0 || frames_.pinned_bytes() + budgets_.all_homes() + unspent() + more <= memory_.budget().limit();
}

bool Grants::fits(const Need& need) const {
  const auto use = frames_.use_of_this_thread();
  const bool is_its_turn = use.pins > 0 || use.claimed > 0 || std::ranges::all_of(waiting_, &Ticket::blocked);
  return (is_its_turn || (beyond_claim(need) == 0 && need.held == 0)) && fits_beside_others(need);
}

bool Grants::is_waiting(std::uint64_t thread) const {
  return std::ranges::any_of(waiting_, [&](const Ticket& ticket) { return ticket.thread == thread; }) ||
         std::ranges::any_of(stuck_, [&](const Stuck* s) { return s->thread_ == thread && !s->may_go_(); });
}

Grants::Stuck::Stuck(Grants& grants, const std::function<bool()>& may_go) : grants_(grants), may_go_(may_go) {
  grants_.stuck_.push_back(this);
  grants_.monitor_.changed().notify_all();
}

Grants::Stuck::~Stuck() { std::erase(grants_.stuck_, this); }

bool Grants::is_first(const Ticket& ticket) const {
  for (const Ticket& other : waiting_) {
    if (&other == &ticket) return true;
    if (!other.blocked) return false;
  }
  return false;
}

/// Whether another thread that does not wait here has pins or claims that end with its operator.
bool Grants::some_will_let_go(std::uint64_t but) const {
  return std::ranges::any_of(frames_.uses(), [&](const auto& use) {
    return (use.pins > use.lasting || use.claimed > 0) && use.thread != but && !is_waiting(use.thread);
  });
}

bool Grants::some_hold_lastingly(std::uint64_t but) const {
  return std::ranges::any_of(frames_.uses(), [&](const auto& use) {
    return use.lasting > 0 && use.thread != but && !is_waiting(use.thread);
  });
}

bool Grants::wait_for_others(Lock& lock) {
  if (is_below_ranks()) return wait_for_brief_pins(lock);  // if refused, ShardedHome frees what its gathers hold
  const std::uint64_t me = this_thread_number();
  const auto pins_of_others = [&, own = frames_.use_of_this_thread().pins] { return frames_.pins() - own; };
  const auto is_hopeless = [&] { return !some_will_let_go(me) && !some_hold_lastingly(me); };
  if (is_hopeless()) return false;
  const std::size_t before = pins_of_others(), queued = frames_.victims().size();
  const std::function<bool()> has_changed = [&, free = memory_.free()] {
    return pins_of_others() < before || frames_.victims().size() != queued || memory_.free() != free;
  };
  const Waiting waiting(monitor_, Cause::memory);
  const Inside inside(monitor_);
  const Stuck stuck(*this, has_changed);
  const auto give_up_at = Clock::now() + longest_wait_;
  while (!has_changed() && !is_hopeless() && !monitor_.closed()) {
    if (tidy_above(lock)) return true;
    const bool others_run = some_will_let_go(me);
    if (!others_run && Clock::now() >= give_up_at) break;
    sleep_until(lock, others_run ? Clock::time_point::max() : give_up_at);
  }
  monitor_.check_usable();
  return has_changed();
}

/// True if there were any.
bool Grants::wait_for_brief_pins(Lock& lock) {
  if (frames_.brief_pins() == 0) return false;
  const Waiting waiting(monitor_, Cause::memory);
  const Inside inside(monitor_);
  while (frames_.brief_pins() > 0 && !monitor_.closed()) monitor_.sleep(lock);
  monitor_.check_usable();
  return true;
}

bool Grants::tidy_above(Lock& lock) {
  if (!upper_.connected()) return false;
  const std::size_t pins = frames_.pins(), queued = frames_.victims().size(), free = memory_.free();
  bool ended = false;
  {
    const Inside inside(monitor_);
    const Unlocked unlocked(lock);
    ended = upper_.tidy();
  }
  monitor_.check_usable();
  // Other threads may have unpinned frames, or begun to write them, while this one had no lock.
  return ended || frames_.pins() != pins || frames_.victims().size() != queued || memory_.free() != free;
}

Grants::Claim Grants::wait_for(Lock& lock, const std::function<Need()>& need) {
  Need wanted = need();
  if (!fits(wanted)) wanted = wait_in_turn(lock, need);
  const std::size_t more = beyond_claim(wanted);
  frames_.claim(more);
  budgets_.hold(wanted.held);
  return Claim(*this, more, wanted.held);
}

void Grants::end(std::size_t bytes, std::size_t held) noexcept {
  budgets_.let_go(held);
  frames_.end_spent_claim(bytes);
}

/// Whether other threads' pins and claims are not all that is in the way.
bool Grants::can_never_fit(const Need& need) const {
  const std::size_t own = frames_.use_of_this_thread().pinned;
  return need.held + budgets_.homes_in(Tier::device) > budgets_.device_limit() ||
         need.bytes + own + budgets_.all_homes() > memory_.budget().limit();
}

Grants::Need Grants::wait_in_turn(Lock& lock, const std::function<Need()>& need) {
  const auto use = frames_.use_of_this_thread();
  const bool holds = use.pins > 0 || use.claimed > 0;
  const auto place = std::ranges::find_if(waiting_, [&](const Ticket& other) { return holds && !other.holds; });
  struct Waits {
    Grants& grants;
    std::list<Ticket>::iterator ticket;
    ~Waits() {
      grants.waiting_.erase(ticket);
      grants.monitor_.changed().notify_all();
    }
  } waits{*this, waiting_.insert(place, {this_thread_number(), holds})};
  Ticket& ticket = *waits.ticket;
  monitor_.changed().notify_all();  // the others' turn may have changed
  const Waiting waiting(monitor_, Cause::memory);
  const Inside inside(monitor_);
  Clock::time_point give_up_at = Clock::time_point::max();  // once lasting pins were all that was in the way
  while (true) {
    monitor_.check_usable();
    const Need wanted = need();
    if (is_first(ticket)) {
      if (fits_beside_others(wanted)) return wanted;
      if (tidy_above(lock)) continue;
      if (can_never_fit(wanted)) refuse(wanted);
      const bool others_run = some_will_let_go(this_thread_number());
      if (is_below_ranks()) {
        if (wait_for_brief_pins(lock)) continue;
        refuse(wanted);  // ShardedHome then frees what its gathers hold
      }
      const bool was_blocked =
          std::exchange(ticket.blocked, !others_run && some_hold_lastingly(this_thread_number()));
      if (!others_run && !ticket.blocked) refuse(wanted);
      if (ticket.blocked && give_up_at == Clock::time_point::max()) give_up_at = Clock::now() + longest_wait_;
      if (ticket.blocked && Clock::now() >= give_up_at) refuse(wanted);
      if (ticket.blocked && !was_blocked) monitor_.changed().notify_all();  // it is the turn of others
    }
    sleep_until(lock, ticket.blocked ? give_up_at : Clock::time_point::max());
  }
}

/// Sleeps until something has changed, or until it is time to look for ended transfers of a device.
void Grants::sleep_until(Lock& lock, Clock::time_point until) {
  if (upper_.connected()) until = std::min(until, Clock::now() + kUntilTidied);
  until == Clock::time_point::max() ? monitor_.sleep(lock) : void(monitor_.changed().wait_until(lock, until));
}

void Grants::refuse(const Need& need) const {
  std::size_t lasting = 0;
  for (const auto& use : frames_.uses()) lasting += use.lasting;
  const std::string of_lasting =
      lasting > 0 ? fmt::format(
                        ". {} pins last (zeropage.pinned() or saved activations that are in use): let go of them, or "
                        "set memory_timeout to wait longer than {:.3g} s",
                        lasting, std::chrono::duration<double>(longest_wait_).count())
                  : "";
  if (need.held > 0 && !budgets_.can_hold(need.held)) budgets_.refuse(need.held, of_lasting);
  budgets_.refuse_pages(need.bytes, frames_.pinned_bytes() + unspent(), of_lasting);
}

}  // namespace zeropage
