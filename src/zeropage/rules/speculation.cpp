#include "zeropage/rules/speculation.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "zeropage/base/errors.h"
#include "zeropage/rules/mixed.h"
#include "zeropage/rules/update_habit.h"

namespace zeropage {
namespace {

std::function<StepNumbers(std::int64_t)> next_numbers;

/// Under the domain's deferral_mutex.
UpdateHabit* habit_of(const StorageSegment& leaf) { return static_cast<UpdateHabit*>(leaf.update_habit.get()); }

/// Whether its updates may run ahead at all.
bool is_eligible(const StorageSegment& leaf) {
  return leaf.domain()->update_ahead != UpdateAhead::never && leaf.cache() && leaf.tier() == Tier::disk;
}

UpdateHabit* make_habit(StorageSegment& leaf) {
  if (!leaf.update_habit && is_eligible(leaf)) leaf.update_habit = std::make_shared<UpdateHabit>();
  return habit_of(leaf);
}

/// An update that ran, and whose step has yet to come.
class RanAhead final : public WrittenAhead, public std::enable_shared_from_this<RanAhead> {
 public:
  RanAhead(std::shared_ptr<Domain> domain, std::shared_ptr<void> habit, ExpectedUpdate update, int gradient)
      : domain_(std::move(domain)), habit_(std::move(habit)), update_(std::move(update)), gradient_(gradient) {
    for (const Program::Slot& slot : update_.program->slots()) {
      addresses_.push_back(slot.segment ? slot.segment->virtual_address() : 0);
    }
  }

  /// False, and the segments are what they were, if one of them cannot have a second version. What is dirty in memory
  /// is cheaper to update there, when the step asks for it; but where the plan has learnt that an update runs ahead,
  /// it goes on doing so.
  bool open(bool ran_ahead_before) {
    for (StorageSegment* segment : update_.written) {
      // What operators see of a master is made again where it is wanted.
      const bool follows = follows_master(*segment);
      const bool write_first = ran_ahead_before || segment->role() == Role::parameter;
      if (!follows && !domain_->cache->open_version(*segment, write_first)) {
        close();
        return false;
      }
      if (!follows) opened_.push_back(segment);
    }
    for (StorageSegment* segment : update_.written) segment->set_written_ahead(shared_from_this());
    return true;
  }

  /// Throws what the program throws.
  void run() {
    const Running running(running_);
    ++domain_->updates_ahead;
    update_.program->execute();
    const StorageSegment& gradient = *update_.program->slots()[gradient_].segment;
    changes_ = gradient.cache()->changes(gradient);
    for (StorageSegment* segment : opened_) domain_->cache->write_behind(*segment);
  }

  /// Whether it is what the program would do.
  bool is(const Program& program, const ParameterUpdate& update) const {
    const auto same_bits = [](double a, double b) {
      return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
    };
    if (opened_.empty() || !update.all_factors_are_one ||
        !std::ranges::equal(update.numbers, update_.numbers, same_bits)) {
      return false;
    }
    const StorageSegment& gradient = *program.slots()[update.gradient].segment;
    if (gradient.cache()->changes(gradient) != changes_) return false;
    return same_code(update_.program->code().instructions, update.rest, [&](int slot, int other) {
      const Program::Slot& its = program.slots()[other];
      return its.temporary ? addresses_[slot] == 0 : addresses_[slot] == its.segment->virtual_address();
    });
  }

  /// False, and nothing has happened, if it was not written whole.
  bool commit() {
    const std::vector<Segment*> segments(opened_.begin(), opened_.end());
    if (!domain_->cache->commit_versions(segments)) return false;
    ++domain_->updates_committed;
    opened_.clear();
    forget();
    return true;
  }

  void discard() override {
    if (running_ || opened_.empty()) return;
    const auto self = shared_from_this();
    for (const StorageSegment* segment : opened_) domain_->discarded_bytes += segment->bytes();
    const std::vector<StorageSegment*> written = update_.written;
    forget();
    close();
    for (StorageSegment* segment : written) {
      if (follows_master(*segment)) follow_master(*segment);
    }
    static_cast<UpdateHabit*>(habit_.get())->missed();
  }

 private:
  void forget() {
    const auto self = shared_from_this();
    for (StorageSegment* segment : std::exchange(update_.written, {})) segment->set_written_ahead(nullptr);
  }

  void close() {
    for (StorageSegment* segment : std::exchange(opened_, {})) {
      try {
        domain_->cache->discard_version(*segment);
      } catch (const AccessError&) {  // the cache is closed: there is no content any more
      }
    }
  }

  const std::shared_ptr<Domain> domain_;
  const std::shared_ptr<void> habit_;
  ExpectedUpdate update_;
  const int gradient_;
  std::vector<std::uint64_t> addresses_;  // by slot, virtual; 0: a temporary. Segments may be gone
  std::vector<StorageSegment*> opened_;   // of update_.written, which are alive: one that dies discards this
  std::uint64_t changes_ = 0;             // of the gradient
  bool running_ = false;
};

/// What backward made, of a gradient that is widened from it or is it; null if there is more to it.
StorageSegment* made_by_backward(StorageSegment& gradient, bool widens) {
  const auto program = std::static_pointer_cast<Program>(gradient.deferred());
  if (!widens) return program || gradient.is_unallocated() ? nullptr : &gradient;
  if (!program || program->length() != 1 || !program->makes_only(gradient)) return nullptr;
  return program->slots()[0].segment;
}

}  // namespace

void set_next_numbers(std::function<StepNumbers(std::int64_t)> next) { next_numbers = std::move(next); }

bool note_arrival(StorageSegment& leaf) {
  const UpdateAhead when = leaf.domain()->update_ahead;
  if (when == UpdateAhead::never) return false;
  std::lock_guard lock(leaf.domain()->deferral_mutex);
  UpdateHabit* const habit = habit_of(leaf);
  return habit && ++habit->arrivals == habit->arrivals_a_step && habit->is_expected(when);
}

void update_ahead(StorageSegment& leaf, const at::Tensor& gradient) {
  const std::shared_ptr<Domain> domain = leaf.domain();
  const UpdateAhead when = domain->update_ahead;
  if (!segment_of(gradient) || (when == UpdateAhead::automatic && domain->cache->holds_everything())) return;
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
  if (!made || !habit->is_expected(when)) return;
  auto update = habit->expected(domain, *made, numbers);
  if (!update) return;
  const auto storages = std::move(update->storages);  // nothing of it dies meanwhile
  const auto program = std::static_pointer_cast<Program>(made->deferred());
  const auto ahead = std::make_shared<RanAhead>(domain, held, std::move(*update), habit->gradient());
  const bool ran_ahead = std::exchange(habit->runs_ahead, true);
  if (!ahead->open(ran_ahead || when == UpdateAhead::always)) return habit->refused();
  try {
    if (program) {
      const Running runs_already = program->hold();  // that only widens: the update does so itself
      ahead->run();
    } else {
      ahead->run();
    }
  } catch (const Error&) {
    ahead->discard();  // the step meets it again, and tells
  } catch (...) {
    ahead->discard();
    throw;
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
    if (const auto deferred = leaf->deferred()) deferred->settle();
  }
}

void settle_update(Program& program) {
  const auto update = as_update_of_parameter(program);
  const auto ahead = update ? std::static_pointer_cast<RanAhead>(update->parameter->written_ahead()) : nullptr;
  const bool commits = ahead && ahead->is(program, *update) && ahead->commit();
  for (const Program::Slot& slot : program.slots()) {
    if (!slot.segment) continue;
    if (const auto other = slot.segment->written_ahead()) other->discard();
  }
  UpdateHabit* const habit = update ? make_habit(*update->parameter) : nullptr;
  if (habit) habit->learn(program, *update);
  if (!commits) return;
  habit->hit();
  program.keep(update->making);
}

}  // namespace zeropage
