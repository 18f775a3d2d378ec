#include "zeropage/rules/speculation.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/trace.h"
#include "zeropage/rules/update_balance.h"
#include "zeropage/rules/update_habit.h"

namespace zeropage {
namespace {

std::function<StepNumbers(std::int64_t)> next_numbers;

/// Needs the domain's deferral_mutex.
UpdateHabit* habit_of(const StorageSegment& leaf) { return static_cast<UpdateHabit*>(leaf.update_habit.get()); }

/// Whether its updates may run early at all.
bool is_eligible(const StorageSegment& leaf) {
  return leaf.domain()->early_update != EarlyUpdate::never && leaf.cache() && leaf.at_home().tier() == Tier::disk;
}

/// Whether the segment's home holds all of its content, so that a program can use it there while the gathered tensor
/// stays as it is.
bool is_at_home(const StorageSegment& segment) {
  if (!segment.domain()->partition.ranks || segment.number() == 0) return true;
  return segment.is_partitioned() && !segment.run()->packed() && segment.cache()->is_unused(segment);
}

std::uint64_t changes_of(const StorageSegment& segment) {
  return segment.at_home().cache()->changes(segment.at_home());
}

UpdateHabit* make_habit(StorageSegment& leaf) {
  if (!leaf.update_habit && is_eligible(leaf)) leaf.update_habit = std::make_shared<UpdateHabit>();
  return habit_of(leaf);
}

/// An early update whose step has yet to come.
class RanAhead final : public WrittenAhead, public std::enable_shared_from_this<RanAhead> {
 public:
  RanAhead(std::shared_ptr<Domain> domain, std::shared_ptr<void> habit, ExpectedUpdate update)
      : domain_(std::move(domain)), habit_(std::move(habit)), update_(std::move(update)) {
    for (const Program::Slot& slot : update_.program->slots()) {
      addresses_.push_back(slot.segment ? slot.segment->virtual_address() : 0);
    }
  }

  /// Opens shadow copies. False, and the segments are unchanged, if one of them cannot have one. A segment that is
  /// dirty in memory is cheaper to update there, at the step. But if its last update ran early and the plan has
  /// learnt so, this one does too.
  bool open(bool ran_ahead_before) {
    const Running running(running_);
    for (StorageSegment* segment : update_.written) segment->set_written_ahead(shared_from_this());
    // Only now: from here on, other threads settle the segments before they use them.
    const auto is_ready = [](const Program::Slot& slot) { return !slot.segment || is_at_home(*slot.segment); };
    if (!std::ranges::all_of(update_.program->slots(), is_ready)) {
      forget();
      return false;
    }
    for (StorageSegment* segment : update_.written) {
      const bool write_first = ran_ahead_before || segment->role() == Role::parameter;
      if (!domain_->cache->open_version(segment->at_home(), write_first)) {
        close();
        forget();
        return false;
      }
      opened_.push_back(segment);
    }
    return true;
  }

  /// Runs the program into the shadow copies. Throws the program's errors.
  void run() {
    const Running running(running_);
    const OfShares of_shares;
    ++domain_->early_updates;
    const std::size_t not_finite = domain_->not_finite;
    {
      const TraceSpan span("update", "update ahead");
      const Booking booking(&domain_->cache->booked(), Spent::updates);
      update_.program->execute();
    }
    not_finite_ = domain_->not_finite - not_finite;
    for (const Program::Slot& slot : update_.program->slots()) {
      const bool is_read = slot.segment && slot.access == Access::read;
      changes_.push_back(is_read ? changes_of(*slot.segment) : 0);
    }
    for (StorageSegment* segment : opened_) domain_->cache->write_behind(segment->at_home());
  }

  /// Whether the program would do the same.
  bool is(const Program& program, const ParameterUpdate& update) const {
    const auto same_bits = [](double a, double b) {
      return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
    };
    if (opened_.empty() || changes_.empty() || !update.all_factors_are_one) return false;
    if (!std::ranges::equal(update.numbers, update_.numbers, same_bits)) return false;
    return same_code(update_.program->code().instructions, update.rest, [&](int slot, int other) {
      const Program::Slot& its = program.slots()[other];
      if (its.temporary) return addresses_[slot] == 0;
      if (addresses_[slot] != its.segment->virtual_address()) return false;
      // The inputs must not have changed since.
      const bool was_read = update_.program->slots()[slot].access == Access::read;
      return !was_read || (changes_[slot] == changes_of(*its.segment) && is_at_home(*its.segment));
    });
  }

  /// Makes the shadow copies the content. False, and nothing has happened, if they are incomplete.
  bool commit() {
    std::vector<Segment*> segments;
    for (StorageSegment* segment : opened_) segments.push_back(&segment->at_home());
    if (!domain_->cache->commit_versions(segments)) return false;
    ++domain_->updates_committed;
    opened_.clear();
    forget();
    return true;
  }

  void discard() override {
    if (running_ || update_.written.empty()) return;
    const auto self = shared_from_this();
    const Running running(running_);
    if (!opened_.empty()) static_cast<UpdateHabit*>(habit_.get())->missed();
    for (const StorageSegment* segment : opened_) domain_->wasted_bytes += segment->at_home().bytes();
    domain_->not_finite -= std::exchange(not_finite_, 0);
    close();   // If this throws, the next operator goes on here.
    forget();  // Other threads may use the segments from here on.
  }

 private:
  void forget() {
    const auto self = shared_from_this();
    for (StorageSegment* segment : std::exchange(update_.written, {})) segment->set_written_ahead(nullptr);
  }

  void close() {
    try {
      domain_->cache->check_usable();
      for (StorageSegment* segment : std::exchange(opened_, {})) domain_->cache->discard_version(segment->at_home());
    } catch (const AccessError&) {  // the cache is closed, or a forked child's: the content is gone
      opened_.clear();
    }
  }

  const std::shared_ptr<Domain> domain_;
  const std::shared_ptr<void> habit_;
  ExpectedUpdate update_;
  std::vector<std::uint64_t> addresses_;  // virtual, by slot; 0: a temporary. Segments may be gone.
  std::vector<StorageSegment*> opened_;   // part of update_.written. All live: a segment that dies discards this.
  std::vector<std::uint64_t> changes_;    // of inputs, by slot, after the run; empty: it has not run.
  std::size_t not_finite_ = 0;            // values in the gradient.
  bool running_ = false;
};

Moment moment(const Domain& domain) {
  const CacheStats stats = domain.cache->stats();
  const auto waited = [&](Spent spent) { return stats.spent[static_cast<std::size_t>(spent)]; };
  const double now = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  return {now, waited(Spent::disk) + waited(Spent::memory), now - stats.disk_seconds};
}

/// The segment that backward wrote: the gradient, or the narrower tensor that it widens. Null if more is deferred.
StorageSegment* made_by_backward(StorageSegment& gradient, bool widens) {
  const auto program = std::static_pointer_cast<Program>(gradient.deferred());
  if (!widens) return program || gradient.is_unallocated() ? nullptr : &gradient;
  if (!program || program->length() != 1 || !program->makes_only(gradient)) return nullptr;
  return program->slots()[0].segment;
}

/// Whether backward updates the parameter of so many bytes, or leaves it to forward. `may`: it can update it.
bool backward_takes(Domain& domain, std::size_t bytes, bool may) {
  if (domain.leaves_updates && ++domain.last_arrivals % 3 == 0) return false;
  if (domain.early_update == EarlyUpdate::always) return may;
  if (!domain.update_balance) domain.update_balance = std::make_shared<UpdateBalance>();
  return domain.update_balance->takes(bytes, may, [&] { return moment(domain); });
}

}  // namespace

void set_next_numbers(std::function<StepNumbers(std::int64_t)> next) { next_numbers = std::move(next); }

bool note_arrival(StorageSegment& leaf, bool was_deferred) {
  const EarlyUpdate when = leaf.domain()->early_update;
  ++leaf.domain()->arrivals;
  if (when == EarlyUpdate::never) return false;
  std::lock_guard lock(leaf.domain()->deferral_mutex);
  UpdateHabit* const habit = habit_of(leaf);
  if (!habit) return false;
  if (was_deferred) habit->only_looked_up = UpdateHabit::kLookedUp;
  if (++habit->arrivals != habit->arrivals_a_step) return false;
  const bool is_left = when == EarlyUpdate::automatic && habit->only_looked_up > 0 && !leaf.domain()->leaves_updates;
  const bool may = habit->is_expected(when);
  if (!is_left && backward_takes(*leaf.domain(), leaf.bytes(), may)) return true;
  habit->runs_ahead = false;
  return false;
}

bool ends_sum(const StorageSegment& leaf) {
  std::lock_guard lock(leaf.domain()->deferral_mutex);
  const UpdateHabit* const habit = habit_of(leaf);
  return !habit || habit->arrivals == habit->arrivals_a_step;
}

void note_only_looked_up(const std::shared_ptr<void>& update_habit) {
  if (auto* const habit = static_cast<UpdateHabit*>(update_habit.get()))
    habit->only_looked_up = UpdateHabit::kLookedUp;
}

void early_update(StorageSegment& leaf, const at::Tensor& gradient) {
  const std::shared_ptr<Domain> domain = leaf.domain();
  const EarlyUpdate when = domain->early_update;
  if (!segment_of(gradient) || (when == EarlyUpdate::automatic && domain->cache->holds_everything())) return;
  std::unique_lock lock(domain->deferral_mutex);
  const auto held = leaf.update_habit;
  UpdateHabit* const habit = habit_of(leaf);
  if (!habit) return;
  StepNumbers numbers;
  if (habit->optimizer >= 0 && next_numbers) {
    const std::int64_t optimizer = habit->optimizer;
    lock.unlock();
    numbers = next_numbers(optimizer);
    lock.lock();
  }
  StorageSegment* const made = made_by_backward(*segment_of(gradient), habit->widens());
  if (!made || made->is_pinned() || !habit->is_expected(when)) return;
  auto update = habit->expected(domain, *made, numbers);
  if (!update) return;
  const auto storages = std::move(update->storages);  // keeps its segments alive meanwhile
  const auto is_open = [](const Program::Slot& slot) { return slot.segment && slot.segment->written_ahead(); };
  if (std::ranges::any_of(update->program->slots(), is_open)) return;  // an earlier one, which no step has settled
  const auto program = std::static_pointer_cast<Program>(made->deferred());
  const auto ahead = std::make_shared<RanAhead>(domain, held, std::move(*update));
  const bool ran_ahead = std::exchange(habit->runs_ahead, true);
  try {
    if (!ahead->open(ran_ahead || when == EarlyUpdate::always)) return habit->refused();
    if (program) {
      const Running runs_already = program->hold();  // that only widens: the update does so itself
      ahead->run();
    } else {
      ahead->run();
    }
  } catch (const std::exception&) {  // of memory, of the disk or of an operator that was given an unexpected number
    ahead->discard();                // the step meets the error again if it is real, and reports it
  }
}

void note_step(c10::ArrayRef<at::Tensor> parameters, std::int64_t optimizer, StepNumbers numbers) {
  const auto known = std::make_shared<const StepNumbers>(std::move(numbers));
  for (const at::Tensor& parameter : parameters) {
    auto* const leaf = segment_of(parameter);
    if (!leaf || !is_eligible(*leaf)) continue;
    const auto domain = leaf->domain();
    std::lock_guard lock(domain->deferral_mutex);
    UpdateHabit* const habit = make_habit(*leaf);
    habit->optimizer = optimizer;
    habit->numbers = known;
    if (domain->update_balance) domain->update_balance->step([&] { return moment(*domain); });
    const auto program = std::static_pointer_cast<Program>(leaf->deferred());
    if (!program) continue;
    program->settle();
    // Lookups open the update of a table that only they use.
    if (habit->only_looked_up == 0) program->open_if_large();
  }
}

void discard_ahead(const Program& program) {
  std::vector<std::shared_ptr<WrittenAhead>> found;  // a copy, because discard() may change the program
  for (const Program::Slot& slot : program.slots()) {
    if (slot.segment && slot.segment->written_ahead()) found.push_back(slot.segment->written_ahead());
  }
  for (const auto& ahead : found) ahead->discard();
}

void settle_update(Program& program) {
  const auto update = as_update_of_parameter(program);
  const auto ahead = update ? std::static_pointer_cast<RanAhead>(update->parameter->written_ahead()) : nullptr;
  const bool commits = ahead && ahead->is(program, *update) && ahead->commit();
  discard_ahead(program);
  UpdateHabit* const habit = update ? make_habit(*update->parameter) : nullptr;
  if (habit) habit->learn(program, *update);
  if (!commits) return;
  habit->hit();
  program.keep(update->making, update->written);
}

}  // namespace zeropage
