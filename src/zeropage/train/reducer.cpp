#include "zeropage/train/reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "zeropage/base/current_activity.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/no_paging_guard.h"
#include "zeropage/base/units.h"
#include "zeropage/plan/machine.h"
#include "zeropage/rules/norms.h"
#include "zeropage/rules/speculation.h"
#include "zeropage/rules/tiles.h"
#include "zeropage/rules/widened.h"
#include "zeropage/train/gradients.h"

namespace zeropage {
namespace {

constexpr std::size_t kSpillBytes = 256 * kKiB;  // smaller ones stay in memory
// Fewer hold up backward where gradients come in bursts. With eight, sums held up the gathers that backward waits
// for.
constexpr std::size_t kBucketsUnderWay = 4;
constexpr std::int64_t kFailed = 16, kReads = 32;  // bits next to those of Reducer::Why

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) { return (hash ^ value) * 0x100000001b3; }  // FNV-1a

}  // namespace

/// One gradient until its mean is delivered.
class Reducer::Reduction final : public Pending, public std::enable_shared_from_this<Reduction> {
 public:
  struct Target {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    bool add;
  };

  Reduction(Reducer& owner, Identity identity, at::Tensor gradient, c10::ScalarType dtype, StorageSegment& target)
      : identity(identity),
        gradient(std::move(gradient)),
        dtype(dtype),
        owner_(owner.weak_from_this()),
        deferral_(owner.domain_.deferral_mutex) {
    scattered = target.is_partitioned() || (target.is_shareable() && !owner.domain_.partition.reduces_whole);
    stripes = target.stripes();
    bytes = stripes.elements() * c10::elementSize(identity.made_in);
  }

  void complete() override {
    if (auto owner = owner_.lock()) owner->complete(*this);
  }

  bool add_to(StorageSegment& sum, const StorageSegment& from) override {
    const auto is_from = [&](const Target& target) {
      const auto storage = target.storage.lock();
      return storage && segment_of(*storage) == &from && !target.add;  // otherwise it is a sum already
    };
    return std::ranges::any_of(targets, is_from) && add_to(sum);
  }

  bool add_to(StorageSegment& sum) {
    if (sum.is_own() || sum.layout() != layout || sum.elements() != stripes.elements()) return false;
    // The operator that widens an earlier mean must have run before this one is added.
    if (const auto earlier = std::dynamic_pointer_cast<Reduction>(sum.pending()); earlier && earlier->is_narrow) {
      sum.complete_pending();
    }
    sum.run_deferred();
    if (arrived) return false;
    add_target(sum, /*add=*/true);
    return true;
  }

  void add_target(StorageSegment& segment, bool add) {
    layout = segment.layout();
    targets.push_back({segment.storage(), add});
    segment.will_come(shared_from_this());
  }

  /// Makes the program's gradient what widens the mean, which has come. Without the reducer's lock.
  void widen() {
    if (!is_narrow) return;
    std::lock_guard lock(deferral_);
    const auto storage = narrow.defined() ? wide.lock() : nullptr;
    StorageSegment* const segment = storage ? segment_of(*storage) : nullptr;
    if (!segment) return narrow.reset();
    c10::NoGradGuard no_grad;
    const OutsideScopes outside;
    // If this throws, the mean stays in `narrow`, and the next use of the gradient tries again.
    widen_into(segment->whole_tensor(narrow.sizes(), narrow.strides(), caffe2::TypeMeta::Make<float>()), narrow);
    narrow.reset();
    if (squares && scattered) squares->foresee(*segment);
    segment->has_come(*this);
  }

  Identity identity;
  at::Tensor gradient;    // flat, in memory order, of this rank alone; undefined: zeros, or already sent
  c10::ScalarType dtype;  // of the mean
  at::Tensor created;     // the first target, until it is handed out
  std::size_t bytes;
  bool scattered;
  Layout layout = Layout::replicated;
  Stripes stripes;
  std::vector<Target> targets;
  bool is_narrow = false;  // its target is `narrow`, with fewer bytes than the gradient that the program sees:
  at::Tensor narrow;       // until widen()
  c10::weak_intrusive_ptr<c10::StorageImpl> wide{c10::intrusive_ptr<c10::StorageImpl>()};
  std::size_t pieces_left = 0;
  bool is_last = false;  // of the step, as far as is known; its update may run as soon as it has come

  /// Takes the norm of the mean while that comes. Null if no norm is expected.
  std::unique_ptr<ArrivingSquares> squares;

  bool failed = false;           // its backward failed before it was sent
  bool sent = false;             // completely
  std::uint64_t last_piece = 0;  // number of the latest piece with a part of it, from 1
  bool arrived = false;          // in part: a target added now would miss that
  bool delivered = false;        // completely

 private:
  std::weak_ptr<Reducer> owner_;
  BookedMutex<std::recursive_mutex>& deferral_;  // of the domain, which lives as long as the reducer
};

struct Reducer::PiecePart {
  ReductionPtr reduction;
  std::size_t in_result;  // first element in the result
  std::size_t begin;      // first element in the share, or in the whole
  std::size_t elements;
};

/// One collective, and the reductions that it delivers content for.
struct Reducer::Piece {
  /// The result's elements that the program has set itself, perhaps to the same values on all ranks.
  std::vector<Collectives::Elements> settled() const {
    std::vector<Collectives::Elements> found;
    for (const PiecePart& part : parts) {
      if (part.reduction->identity.kind == Kind::own)
        found.push_back({part.in_result, part.in_result + part.elements});
    }
    return found;
  }
  std::unique_ptr<Collectives::Mean> work;
  std::size_t elements = 0;  // of the result
  bool is_packed = false;
  bool ends_together = false;  // all ranks must wait for it at the same place
  std::size_t bytes;
  std::vector<PiecePart> parts;
  // Progress of delivery. After an error the next attempt continues here, so nothing is added twice.
  bool over_replicas = false, arrived = false;
  std::size_t part = 0, target = 0, element = 0;
};

Reducer::Reducer(Domain& domain)
    : domain_(domain), ranks_(*domain.partition.ranks), replicas_(domain.partition.replicas.get()) {}

std::shared_ptr<Reducer> Reducer::make(const std::shared_ptr<Domain>& domain) {
  auto reducer = std::make_shared<Reducer>(*domain);
  reducer->ranks_.answer_with([weak = std::weak_ptr(domain)](const std::function<bool()>& has_begun) {
    if (const auto alive = weak.lock()) reducer_of(*alive).answer(has_begun);
  });
  return reducer;
}

Reducer::~Reducer() = default;

Reducer::ReductionPtr Reducer::start(const at::Tensor& leaf, at::Tensor gradient, c10::ScalarType made_in,
                                     Kind kind) {
  const auto* segment = segment_of(leaf);
  const std::uint64_t key = domain_.leaves.know(leaf);
  const bool is_narrow = kind == Kind::first && keeps_narrow(leaf);
  const auto dtype = is_narrow ? c10::scalarTypeToTypeMeta(domain_.partition.reduce_dtype) : gradient_dtype(leaf);
  at::Tensor paged =
      make_paged(segment->domain(), leaf.sizes(), leaf.strides(), dtype, Role::gradient, {.number = key});
  segment_of(paged)->set_reduced();
  auto reduction = std::make_shared<Reduction>(*this, Identity{key, kind, made_in}, std::move(gradient),
                                               paged.scalar_type(), *segment_of(paged));
  reduction->add_target(*segment_of(paged), /*add=*/false);
  if (!is_narrow) {
    reduction->created = std::move(paged);
    return reduction;
  }
  at::Tensor wide = make_paged(segment->domain(), leaf.sizes(), leaf.strides(), gradient_dtype(leaf), Role::gradient,
                               {.layout = segment_of(paged)->layout(), .number = key, .unallocated = true});
  StorageSegment& of_wide = *segment_of(wide);
  of_wide.set_reduced();
  reduction->is_narrow = true;
  reduction->wide = of_wide.storage();
  of_wide.will_come(reduction);
  reduction->narrow = std::move(paged);
  reduction->created = std::move(wide);
  return reduction;
}

/// Whether the mean of a first gradient stays in the two bytes that the program has chosen for it.
bool Reducer::keeps_narrow(const at::Tensor& leaf) const {
  return segment_of(leaf)->master().defined() && gradient_dtype(leaf) == at::kFloat &&
         c10::isReducedFloatingType(domain_.partition.reduce_dtype);
}

namespace {

/// The gradient in the leaf's layout and in `dtype`. A copy in plain memory if it is paged, or if the program or
/// another node holds the same tensor: it could write it while ranks still read it. `to_write`: also if another
/// tensor has its memory, since the caller writes it. One that was computed in tiles stays in pages.
at::Tensor laid_out(const at::Tensor& leaf, const at::Tensor& gradient, c10::ScalarType dtype,
                    bool to_write = false) {
  c10::NoGradGuard no_grad;
  const OutsideScopes outside;
  // AccumulateGrad asks the same before it keeps a gradient.
  const bool has_alias = gradient.storage().use_count() > 1;
  const bool is_shared = gradient.use_count() > 1 || (to_write && has_alias);
  const at::Tensor given = gradient.detach();
  const bool is_plain = !given.is_conj() && !given.is_neg() && !given.key_set().has(c10::DispatchKey::Python);
  const bool fits = given.strides() == leaf.strides() && given.scalar_type() == dtype && is_plain;
  const auto& domain = segment_of(leaf)->domain();
  if (segment_of(given) && domain->tiling != Tiling::off && given.nbytes() > domain->tile_above) {
    if (fits && !is_shared && !has_alias && segment_of(given)->is_own() && is_whole(given)) {
      if (!segment_of(given)->comes_in_parts()) segment_of(given)->complete();  // ranks read its pages as they are
      return given;
    }
    const auto type = c10::scalarTypeToTypeMeta(dtype);
    return make_own_gradient(domain, leaf.sizes(), leaf.strides(), type, /*is_unset=*/true).copy_(given);
  }
  if (fits && !is_shared && !segment_of(given)) return given;
  const auto options = leaf.options().dtype(dtype).requires_grad(false);
  at::Tensor own = [&] {
    const NoPagingGuard no_paging;
    return at::empty_strided(leaf.sizes(), leaf.strides(), options);
  }();
  return own.copy_(given);  // faults if `given` is paged
}

}  // namespace

/// The dtype in which a gradient that backward made in `dtype` takes part: as it is, if ranks can widen it without a
/// loss while they sum it; else the dtype of the mean.
c10::ScalarType Reducer::made_in(const at::Tensor& leaf, c10::ScalarType dtype) const {
  const c10::ScalarType mean = gradient_dtype(leaf).toScalarType();
  if (segment_of(leaf)->accumulated_with != 0) return mean;  // a rank may have a local sum, in the mean's dtype
  const bool is_exact = mean == at::kFloat && c10::isReducedFloatingType(dtype);
  const bool is_planned_on_cpu = domain_.planned_on && domain_.planned_on->speeds.is_unified;
  return is_exact && (ranks_.sums_in_parts(dtype) || is_planned_on_cpu) ? dtype : mean;
}

at::Tensor Reducer::reduce(const at::Tensor& leaf, const at::Tensor& gradient, bool is_last) {
  {
    std::lock_guard lock(mutex_);
    watch_backward();
    sent_groups_.insert(segment_of(leaf)->accumulated_with);
  }
  const at::Tensor sum = local_sums_.take(leaf);
  take_own_gradient(leaf);  // otherwise this gradient's mean would be added to a rank's own gradient
  const bool had_sum = gradient_of(leaf).defined();
  const Kind kind = is_met(leaf, had_sum) ? Kind::again : had_sum ? Kind::added : Kind::first;
  const at::Tensor mean = [&] {
    try {
      return reduce(leaf, gradient, sum, kind, is_last);
    } catch (...) {
      if (sum.defined()) local_sums_.give_back(leaf, sum);
      throw;
    }
  }();
  hand_over();
  return mean;
}

std::optional<at::Tensor> Reducer::accumulate_here(const at::Tensor& leaf, const at::Tensor& gradient) {
  if (!segment_of(leaf)->accumulates_here.load(std::memory_order_relaxed)) return std::nullopt;
  const at::Tensor before = gradient_of(leaf);
  if (!before.defined()) return local_sums_.begin(leaf, gradient);
  const auto* const mean = segment_of(before);
  return mean && !mean->is_own() ? std::nullopt : std::optional(gradient);
}

void Reducer::expect_local_sums(const at::Tensor& leaf, std::uint64_t group) {
  {
    std::lock_guard lock(mutex_);
    uses_local_sums_ = true;  // even if this rank alone throws
  }
  const at::Tensor before = gradient_of(leaf);
  const auto* const mean = before.defined() ? segment_of(before) : nullptr;
  if (mean && !mean->is_own()) set_gradient(leaf, local_sums_.begin(leaf, before));
  segment_of(leaf)->accumulated_with = group;
}

/// False if the leaf has no local sum.
bool Reducer::send_local_sum(const at::Tensor& leaf) {
  const at::Tensor sum = local_sums_.take(leaf);
  if (!sum.defined()) return false;
  const Kind kind = is_met(leaf, /*had_sum=*/false) ? Kind::again : Kind::first;
  try {
    set_gradient(leaf, reduce(leaf, sum, {}, kind, /*is_last=*/false));
  } catch (...) {
    local_sums_.give_back(leaf, sum);
    throw;
  }
  return true;
}

/// At the end of a backward: sends the rest of local sums that belong together with those it has sent.
void Reducer::send_local_sums() {
  std::set<std::uint64_t> groups;
  {
    std::lock_guard lock(mutex_);
    groups.swap(sent_groups_);
  }
  for (const std::uint64_t key : local_sums_.keys()) {
    const at::Tensor leaf = domain_.leaves.find(key);
    const auto* const segment = leaf.defined() ? segment_of(leaf) : nullptr;
    if (!segment || segment->accumulates_here.load(std::memory_order_relaxed)) continue;
    if (groups.contains(segment->accumulated_with)) send_local_sum(leaf);
  }
}

/// Settles at the end of a backward. If this rank cannot send its local sums, all ranks throw.
void Reducer::end_local_sums() {
  std::exception_ptr failure;
  try {
    send_local_sums();
  } catch (...) {
    failure = std::current_exception();
    std::lock_guard lock(mutex_);
    has_failed_ = true;
  }
  try {
    settle();
  } catch (...) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

/// Does what follows from means that have come: widens them, and updates parameters early. Without the lock, since
/// programs have one of their own, and an optimizer's numbers come from Python.
void Reducer::hand_over() {
  std::vector<ReductionPtr> narrow;
  std::vector<std::uint64_t> keys;
  {
    std::lock_guard lock(mutex_);
    narrow.swap(to_widen_);
    keys.swap(to_update_);
  }
  for (const ReductionPtr& reduction : narrow) reduction->widen();
  for (const std::uint64_t key : keys) {
    const at::Tensor leaf = domain_.leaves.find(key);
    auto* const segment = leaf.defined() ? segment_of(leaf) : nullptr;
    const at::Tensor gradient = segment ? gradient_of(leaf) : at::Tensor();  // another thread may clear it
    const auto* const of_gradient = gradient.defined() ? segment_of(gradient) : nullptr;
    if (of_gradient && !of_gradient->is_pending()) early_update(*segment, gradient);
  }
}

/// Whether this backward has met the leaf before, or its own gradient was taken. Notes that it has now.
bool Reducer::is_met(const at::Tensor& leaf, std::optional<bool> had_sum) {
  const std::uint64_t key = domain_.leaves.know(leaf);
  std::lock_guard lock(mutex_);
  return !had_sum_.emplace(key, had_sum).second;
}

at::Tensor Reducer::reduce(const at::Tensor& leaf, const at::Tensor& gradient, const at::Tensor& local_sum, Kind kind,
                           bool is_last) {
  const c10::ScalarType dtype = local_sum.defined() ? local_sum.scalar_type() : made_in(leaf, gradient.scalar_type());
  at::Tensor own = laid_out(leaf, gradient, dtype, /*to_write=*/local_sum.defined());
  if (local_sum.defined()) add_local_sum(own, local_sum);
  std::lock_guard lock(mutex_);
  NoPagingGuard no_paging;
  const Watchdog::GoesOn goes_on;
  const CurrentActivity activity(
      [](const void* leaf) {
        return fmt::format("backward, at the gradient of a parameter [{}]",
                           fmt::join(static_cast<const at::Tensor*>(leaf)->sizes(), ", "));
      },
      &leaf);
  make_room();  // an error of an earlier sum must not come once this one is queued
  auto reduction = start(leaf, own.as_strided(leaf.numel(), 1), dtype, kind);
  reduction->is_last = is_last;
  if (ends_sum(*segment_of(leaf))) {
    reduction->squares =
        std::make_unique<ArrivingSquares>(*segment_of(leaf), reduction->stripes.own(), reduction->dtype);
  }
  at::Tensor paged = std::exchange(reduction->created, {});
  add(std::move(reduction));
  return paged;
}

bool Reducer::take_own_gradient(const at::Tensor& leaf) {
  const auto* segment = segment_of(leaf);
  if (!segment || segment->domain().get() != &domain_ || !gradient_of(leaf).defined()) return false;
  if (send_local_sum(leaf)) return true;
  const at::Tensor set = gradient_of(leaf);
  const auto* made = segment_of(set);
  if (!set.defined() || (made && !made->is_own())) return false;
  {
    std::lock_guard lock(mutex_);
    watch_backward();
  }
  if (set.layout() != c10::kStrided) {
    throw RankError(fmt::format(
        "the gradient of a parameter [{}] was set to a sparse tensor, which is not summed over ranks; set it to "
        "gradient.to_dense()",
        fmt::join(leaf.sizes(), ", ")));
  }
  const at::Tensor given = [&] {
    if (made) return set.detach();
    const NoPagingGuard no_paging;
    return set.detach().clone();  // the program may write its tensor before ranks have summed it
  }();
  const at::Tensor mean = reduce(leaf, given, {}, Kind::own, /*is_last=*/false);
  is_met(leaf, std::nullopt);
  set_gradient(leaf, mean);
  return true;
}

void Reducer::take_set_gradient(const at::Tensor& leaf) {
  const at::Tensor gradient = gradient_of(leaf);
  const auto* const segment = segment_of(leaf);
  const bool is_strided = gradient.defined() && gradient.layout() == c10::kStrided;
  if (!is_strided || !segment || !segment->accumulates_here) return void(take_own_gradient(leaf));
  const auto* const made = segment_of(gradient);
  const bool is_own = !made || made->is_own();
  if (is_own && !local_sums_.holds(leaf)) set_gradient(leaf, local_sums_.begin(leaf, gradient));
}

void Reducer::average(c10::ArrayRef<at::Tensor> leaves, bool with_local_sums) {
  for (const at::Tensor& leaf : leaves) {
    if (with_local_sums || !local_sums_.holds(leaf)) take_own_gradient(leaf);
  }
  if ((unsettled_ || uses_local_sums_) && torch::autograd::get_current_graph_task_id() < 0) settle();
}

/// Runs `exchange`, which all ranks do together. If it fails midway, other ranks may have gone further and no later
/// exchange can succeed. This and all later calls then throw its error.
template <class Exchange>
void Reducer::together(Exchange&& exchange) {
  if (failure_) std::rethrow_exception(failure_);
  try {
    exchange();
  } catch (const RankError&) {
    failure_ = std::current_exception();
    throw;
  } catch (const std::exception& error) {  // of this rank alone; the others wait for it
    failure_ = std::current_exception();
    ranks_.give_up(error.what());
    throw;
  }
}

/// Takes part in exchanges that other ranks wait for, until `has_begun()`. The program meets an error later.
void Reducer::answer(const std::function<bool()>& has_begun) {
  std::lock_guard lock(mutex_);
  const auto talking = ranks_.talk_alone();  // the program's words follow its last sum, as on the other ranks
  const NoPagingGuard no_paging;
  const CurrentActivity activity([](const void*) { return std::string("an answer to ranks with other gradients"); },
                                 nullptr);
  is_answering_ = true;
  try {
    together([&] {
      while (!has_begun()) proposed_ ? void(decide()) : propose(Why::full);
    });
  } catch (...) {
    is_answering_ = false;
    throw;
  }
  is_answering_ = false;
}

void Reducer::add(ReductionPtr reduction) {
  unsettled_ = true;
  open_bytes_ += reduction->bytes;
  open_.push_back(std::move(reduction));
  if (proposed_ && open_bytes_ >= domain_.bucket_bytes / 2) together([&] { decide(); });
  if (open_bytes_ >= domain_.bucket_bytes) together([&] { propose(Why::full); });
}

/// Sees the end of one graph task. If the task fails, PyTorch destroys the callback that owns it.
class Reducer::Watch {
 public:
  explicit Watch(Reducer& reducer) : reducer_(reducer.weak_from_this()) { ++reducer.backwards_; }
  ~Watch() {
    const auto reducer = is_over_ ? nullptr : reducer_.lock();
    if (reducer) reducer->backward_failed();
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void end() {
    const auto reducer = reducer_.lock();
    is_over_ = true;
    if (!reducer) return;
    {
      std::lock_guard lock(reducer->mutex_);
      if (--reducer->backwards_ > 0) return;  // inside another task, whose end serves all
    }
    try {
      reducer->end_local_sums();
    } catch (const Error& error) {
      throw_translated(error);
    }
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  bool is_over_ = false;
};

/// Sends the open bucket when backward ends.
void Reducer::watch_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == backward_ || task < 0) return;
  backward_ = task;
  if (backwards_ == 0) to_update_.clear();  // of gradients that came after their backward, perhaps after their step
  torch::autograd::Engine::get_default_engine().queue_callback(
      [watch = std::make_shared<Watch>(*this)] { watch->end(); });
}

void Reducer::expect_end() {
  std::lock_guard lock(mutex_);
  watch_backward();
}

/// Drops the unsent gradients of a failed backward. Other ranks may have gone further, and learn of it with the next
/// bucket. They already know of the proposed one, so it is still sent, if all ranks have the same.
void Reducer::backward_failed() {
  std::lock_guard lock(mutex_);
  if (--backwards_ > 0) return;
  for (auto* left : {&open_, &pile_}) {
    for (const ReductionPtr& reduction : *left) {
      reduction->failed = true;
      reduction->gradient.reset();
    }
    left->clear();
  }
  open_bytes_ = 0;
  had_sum_.clear();
  sent_groups_.clear();
  to_update_.clear();
  if (proposed_) proposed_->is_stale = true;
  has_failed_ = true;
}

void Reducer::settle() {
  std::vector<std::pair<at::Tensor, at::Tensor>> to_add;
  {
    std::lock_guard lock(mutex_);
    NoPagingGuard no_paging;
    const CurrentActivity activity([](const void*) { return std::string("the sums of backward's last gradients"); },
                                   nullptr);
    together([&] { send_open(); });
    unsettled_ = false;
    had_sum_.clear();
    // Receive before the first delivery, which may fail on this rank alone.
    together([&] {
      while (must_receive_together(pieces_)) receive_next();
    });
    make_room();
    const auto ends_together = [](const auto& piece) { return piece->ends_together; };
    while (std::ranges::any_of(under_way_, ends_together)) complete_oldest();
    to_add.swap(to_add_);
  }
  c10::NoGradGuard no_grad;
  const SameValues same;
  for (const auto& [sum, mean] : to_add) sum.add_(mean);
  hand_over();
}

/// Answers other ranks until all backwards have ended; then all gradients are sent.
void Reducer::send_open() {
  decide();
  while (true) {
    propose(Why::end);
    const Agreed agreed = decide();
    if (agreed.all_ended) return;
    if (is_stuck(agreed)) {
      throw RankError(
          "another rank reads a gradient in backward that this rank's backward, which has ended, has not made: "
          "read it after backward");
    }
  }
}

/// Whether some rank waits for a gradient that no rank will send. All ranks then throw.
bool Reducer::is_stuck(const Agreed& agreed) const {
  return agreed.all_wait && !agreed.all_ended && !agreed.has_sent;
}

/// Answers other ranks until all of them have the gradient, and have received what ranks must receive together: a
/// rank that reads alone would wait there for the others, which may wait for its words.
void Reducer::send_for_reading(const Reduction& reduction) {
  std::optional<Watchdog::GoesOn> goes_on{std::in_place};  // one answer tells all that another rank has
  if (!can_read_alone(reduction)) decide();
  for (int i = 0; !can_read_alone(reduction); ++i) {
    if (i > 0) goes_on.reset();
    propose(reduction.sent ? Why::full : Why::read, /*reads=*/true);
    if (is_stuck(decide())) {
      throw RankError(
          "a gradient is read in backward that another rank does not make, or makes only after it reads one "
          "that this rank lacks: read it after backward");
    }
  }
}

/// Tells the other ranks what the open bucket contains.
void Reducer::propose(Why why, bool reads) {
  std::uint64_t content = 0xcbf29ce484222325;
  for (const ReductionPtr& reduction : open_) {
    const auto& [key, kind, made_in] = reduction->identity;
    content = mix(mix(content, key), reduction->bytes);
    content = mix(content, static_cast<std::uint64_t>(kind) * 256 + static_cast<std::uint64_t>(made_in));
  }
  const std::int64_t failed = std::exchange(has_failed_, false) ? kFailed : 0;
  const bool has_pile = !pile_.empty();  // then ranks must count
  ContractLog::Taken contract = domain_.contract.take();
  const Collectives::Words words{
      static_cast<std::int64_t>(why) | failed | (reads ? kReads : 0), static_cast<std::int64_t>(content),
      has_pile ? -1 : static_cast<std::int64_t>(open_.size()), static_cast<std::int64_t>(contract.hash)};
  proposed_ = Proposal{std::exchange(open_, {}),
                       why,
                       words,
                       has_pile,
                       std::move(contract.text),
                       ranks_.start_agreement(words, {"gradients", 0, 0})};
  open_bytes_ = 0;
}

/// Sends the proposed bucket if all ranks have the same ([Note: buckets and ranks]).
Reducer::Agreed Reducer::decide() {
  if (!proposed_) return {};
  Proposal proposal = *std::exchange(proposed_, std::nullopt);
  Agreed agreed = compare(proposal);
  if (agreed.same) {
    agreed.has_sent = !proposal.bucket.empty();
    send(proposal.bucket);
  } else {
    sort_out(proposal, agreed);
  }
  while (agreed.any_reads && !awaited_.empty()) receive_next();
  return agreed;
}

/// Piles up a bucket that not all ranks have, and sends of the pile what they all have.
void Reducer::sort_out(Proposal& proposal, Agreed& agreed) {
  for (const ReductionPtr& reduction : proposal.bucket) {
    if (!proposal.is_stale) {
      pile_.push_back(reduction);
    } else {
      reduction->failed = true;
      reduction->gradient.reset();
    }
  }
  const Counts counts = count_over_ranks();
  agreed.has_sent = send_what_all_have(counts);
  if (agreed.all_ended) return send_the_rest(counts);
  if (!is_answering_) spill_pile();
}

/// Compares the buckets and piles of ranks, here and among replicas.
Reducer::Agreed Reducer::compare(Proposal& proposal) {
  Collectives::Words mine = proposal.words;
  const std::int64_t failed = mine[0] & kFailed;
  const auto says = [](const Collectives::Words& words, Why why) {
    return (words[0] & ~(kFailed | kReads)) == static_cast<std::int64_t>(why);
  };
  Agreed agreed{.same = !proposal.has_pile, .all_ended = true, .all_wait = true};
  for (Collectives* group : {&ranks_, replicas_}) {
    if (!group) continue;
    const auto all = group == &ranks_ ? group->finish(proposal.agreement) : group->agree(mine, {"gradients", 0, 0});
    check_contract(all, *group, proposal, std::ranges::all_of(all, [&](const auto& w) { return says(w, Why::end); }));
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const auto& words = all[rank];
      if ((words[0] & kFailed) != failed) {
        throw RankError(
            fmt::format("a backward of rank {} ended in an error, and other ranks' did not: their gradients are of "
                        "different batches. Start again from a checkpoint",
                        (words[0] & kFailed) ? rank : static_cast<std::size_t>(group->rank())));
      }
      agreed.all_ended = agreed.all_ended && says(words, Why::end);
      agreed.all_wait = agreed.all_wait && !says(words, Why::full);
      agreed.any_reads = agreed.any_reads || (words[0] & kReads);
      agreed.same = agreed.same && words[1] == mine[1] && words[2] == mine[2] && words[2] >= 0;
    }
    // The result for this shard goes to the replicas.
    const Why why = agreed.all_ended ? Why::end : agreed.all_wait ? Why::read : Why::full;
    mine[0] = static_cast<std::int64_t>(why) | failed | (agreed.any_reads ? kReads : 0);
    mine[2] = agreed.same ? mine[2] : -1;
  }
  return agreed;
}

/// Throws on every rank if ranks wrote different values into tensors that must stay the same. `have_ended`: all ranks
/// are at the end of their backward.
void Reducer::check_contract(const std::vector<Collectives::Words>& all, Collectives& group, const Proposal& proposal,
                             bool have_ended) {
  if (std::all_of(all.begin(), all.end(), [&](const auto& words) { return words[3] == proposal.words[3]; })) return;
  const auto texts = group.all_gather_text(proposal.contract, {"what was written by contract", 0, 0});
  const std::string difference = ContractLog::difference(texts, have_ended);
  if (difference.empty()) return;
  throw RankError(fmt::format(
      "ranks wrote different values into one tensor:{}\nParameters, their gradients and optimizers' states must be "
      "written alike on all ranks: draw random numbers from one seed, and compute from what all ranks have",
      difference));
}

Reducer::Counts Reducer::count_over(Collectives& group, const Counts& mine) {
  const Subject subject{"gradients that not all ranks have", 0, 0};
  std::int64_t most = 0;
  for (const auto& words : group.agree({static_cast<std::int64_t>(mine.most.size())}, subject)) {
    most = std::max(most, words[0]);
  }
  if (most == 0) return {};
  constexpr std::int64_t kColumns = 5;  // key, kind, dtype, least, most; no key is zero
  at::Tensor rows = at::zeros({most, kColumns}, at::kLong);
  auto* row = rows.mutable_data_ptr<std::int64_t>();
  for (const auto& [identity, count] : mine.most) {
    const auto least = mine.least.find(identity);
    *row++ = static_cast<std::int64_t>(identity.key);
    *row++ = static_cast<std::int64_t>(identity.kind);
    *row++ = static_cast<std::int64_t>(identity.made_in);
    *row++ = least == mine.least.end() ? 0 : static_cast<std::int64_t>(least->second);
    *row++ = static_cast<std::int64_t>(count);
  }
  const at::Tensor all = group.all_gather_small(rows, subject).contiguous();
  std::map<Identity, int> holders;
  Counts counts;
  const auto* of_all = all.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < group.size() * most; ++i, of_all += kColumns) {
    const Identity identity{static_cast<std::uint64_t>(of_all[0]), static_cast<Kind>(of_all[1]),
                            static_cast<c10::ScalarType>(of_all[2])};
    if (identity.key == 0) continue;
    const auto least = static_cast<std::size_t>(of_all[3]), count = static_cast<std::size_t>(of_all[4]);
    const bool is_first = holders[identity]++ == 0;
    counts.least[identity] = is_first ? least : std::min(counts.least[identity], least);
    counts.most[identity] = std::max(counts.most[identity], count);
  }
  for (const auto& [identity, count] : holders) {
    if (count < group.size()) counts.least[identity] = 0;
  }
  return counts;
}

Reducer::Counts Reducer::count_over_ranks() const {
  Counts counts;
  for (const ReductionPtr& reduction : pile_) ++counts.most[reduction->identity];
  counts.least = counts.most;
  counts = count_over(ranks_, counts);
  return replicas_ ? count_over(*replicas_, counts) : counts;
}

/// Sends in the order of identities, and within one in the order of arrival. Returns whether there were any, on every
/// rank alike.
bool Reducer::send_what_all_have(const Counts& counts) {
  std::map<Identity, std::vector<ReductionPtr>> by_identity;
  std::map<Identity, std::size_t> taken;
  std::vector<ReductionPtr> left;
  for (const ReductionPtr& reduction : pile_) {
    const auto least = counts.least.find(reduction->identity);
    const bool have_all = least != counts.least.end() && taken[reduction->identity] < least->second;
    if (have_all) ++taken[reduction->identity];
    (have_all ? by_identity[reduction->identity] : left).push_back(reduction);
  }
  pile_ = std::move(left);
  std::vector<ReductionPtr> common;
  for (auto& [_, reductions] : by_identity) common.insert(common.end(), reductions.begin(), reductions.end());
  const bool has_any = !common.empty();
  send(common);
  return has_any;
}

/// Sends the union of the ranks' piles. If a rank cannot take part, all throw before they send.
void Reducer::send_the_rest(const Counts& counts) {
  auto pile = std::exchange(pile_, {});
  std::vector<ReductionPtr> rest;
  std::string failure;
  try {
    check_cleared(counts);
    for (const auto& [identity, most] : counts.most) {
      const auto least = counts.least.find(identity);
      std::size_t wanted = most - (least == counts.least.end() ? 0 : least->second);
      for (const ReductionPtr& mine : pile) {
        if (mine->identity == identity && wanted > 0) rest.push_back(mine), --wanted;
      }
      for (; wanted > 0; --wanted) rest.push_back(missing(identity));
    }
  } catch (const std::exception& error) {
    failure = fmt::format("rank {}: {}", ranks_.rank(), error.what());
  }
  const bool some_lack = std::ranges::any_of(counts.most, [&](const auto& most) {
    const auto least = counts.least.find(most.first);
    return least == counts.least.end() || least->second < most.second;
  });
  if (some_lack) throw_together(std::move(failure));
  send(rest);
}

/// Throws if this rank has an earlier gradient of a leaf, and others have cleared theirs, or the other way round.
void Reducer::check_cleared(const Counts& counts) const {
  for (const auto& [identity, _] : counts.most) {
    if (identity.kind != Kind::first && identity.kind != Kind::added) continue;
    const at::Tensor leaf = domain_.leaves.find(identity.key);
    if (!leaf.defined()) continue;
    const auto met = had_sum_.find(identity.key);
    const at::Tensor before = gradient_of(leaf);
    const auto* sum = before.defined() ? segment_of(before) : nullptr;
    const bool is_free = before.defined() && (!sum || sum->is_own());  // the program has set it
    if (met == had_sum_.end() ? is_free : !met->second) continue;
    const bool had_sum = met == had_sum_.end() ? sum != nullptr : *met->second;
    if (had_sum == (identity.kind == Kind::added)) continue;
    throw RankError(
        fmt::format("backward adds to an earlier gradient of a parameter [{}] on some ranks, and others have none: "
                    "clear gradients "
                    "with zero_grad() on all ranks, or on none",
                    fmt::join(leaf.sizes(), ", ")));
  }
}

/// Throws on every rank if one has failed; `failure` is this rank's.
void Reducer::throw_together(std::string failure) {
  const Subject subject{"gradients that not all ranks have", 0, 0};
  for (Collectives* group : {&ranks_, replicas_}) {
    if (!group) continue;
    const auto all = group->agree({failure.empty() ? 0 : 1}, subject);
    if (std::ranges::all_of(all, [](const auto& words) { return words[0] == 0; })) continue;
    for (const std::string& said : group->all_gather_text(failure, subject)) {
      if (failure.empty()) failure = said;
    }
  }
  if (!failure.empty()) throw RankError(failure);
}

/// Moves gradients that wait for other ranks into pages.
void Reducer::spill_pile() {
  for (const ReductionPtr& reduction : pile_) {
    at::Tensor& gradient = reduction->gradient;
    const auto storage = reduction->targets[0].storage.lock();
    const auto* segment = storage ? segment_of(*storage) : nullptr;
    if (auto* const own = segment_of(gradient); own && own->comes_in_parts())
      own->complete();  // what it needs can die
    if (!segment || !gradient.defined() || segment_of(gradient) || gradient.nbytes() < kSpillBytes) continue;
    const at::Tensor paged = make_paged(segment->domain(), gradient.sizes(), gradient.strides(), gradient.dtype(),
                                        Role::gradient, {.is_local = true});
    std::size_t done = 0;
    write(*segment_of(paged), 0, gradient.scalar_type(), gradient.numel(), done,
          [&](const at::Tensor& slice, std::size_t begin) {
            slice.copy_(gradient.narrow(0, static_cast<std::int64_t>(begin), slice.numel()));
          });
    gradient = paged;
  }
}

/// The gradient that this rank has for itself, although its backward has not met the leaf.
Reducer::ReductionPtr Reducer::own_of(const at::Tensor& parameter, const Identity& identity) {
  const at::Tensor own = [&] {
    const PagingAgain paging;
    return laid_out(parameter, gradient_of(parameter).detach().clone(), identity.made_in);
  }();
  auto reduction = start(parameter, own.as_strided(parameter.numel(), 1), identity.made_in, identity.kind);
  set_gradient(parameter, std::exchange(reduction->created, {}));
  return reduction;
}

/// Zeros for a gradient that this rank lacks and others have. The leaf gets the mean all the same.
Reducer::ReductionPtr Reducer::missing(const Identity& identity) {
  at::Tensor parameter = domain_.leaves.find(identity.key);
  if (parameter.defined()) {
    const PagingAgain paging;
    if (const auto domain = domain_that_knows(parameter)) page_again(parameter, domain);
  }
  if (!parameter.defined() || !segment_of(parameter)) {
    throw RankError(
        fmt::format("other ranks have a gradient for parameter {}, which this rank has never used; let every rank "
                    "use it, or call "
                    "zeropage.gather_together(module) on its module",
                    identity.key));
  }
  const at::Tensor before = gradient_of(parameter);
  const bool is_free = before.defined() && (!segment_of(before) || segment_of(before)->is_own());
  const bool takes_part = identity.kind == Kind::own || local_sums_.holds(parameter);
  if (takes_part && is_free && before.layout() == c10::kStrided) return own_of(parameter, identity);
  auto reduction = start(parameter, {}, identity.made_in, identity.kind);
  at::Tensor created = std::exchange(reduction->created, {});
  if (!before.defined()) {
    set_gradient(parameter, std::move(created));
  } else if (auto* target = segment_of(before);
             !target || before.scalar_type() != reduction->dtype || !reduction->add_to(*target)) {
    to_add_.emplace_back(before, std::move(created));  // a gradient that the program set
  }
  return reduction;
}

// --- sending ---

void Reducer::send(std::vector<ReductionPtr>& reductions) {
  for (const ReductionPtr& reduction : reductions) {
    const bool is_tiled = domain_.tiling != Tiling::off && reduction->bytes > domain_.tile_above;
    if (!is_tiled) largest_ = std::max(largest_, reduction->bytes);  // on all ranks alike
  }
  std::vector<PackedPart> parts, wholes;  // parts to pack
  for (const ReductionPtr& reduction : reductions) {
    reduction->scattered ? send_pages(reduction, parts) : wholes.push_back({reduction, 0});
  }
  if (!parts.empty()) send_packed_parts(parts);
  if (!wholes.empty()) send_packed_wholes(wholes);
  for (const ReductionPtr& reduction : reductions) {
    reduction->gradient.reset();
    reduction->sent = true;
    finish(*reduction);
  }
}

c10::ScalarType Reducer::wire_dtype(const Reduction& reduction) const {
  return chosen_dtype(reduction).value_or(reduction.identity.made_in);
}

/// The dtype that the program has chosen for sums.
std::optional<c10::ScalarType> Reducer::chosen_dtype(const Reduction& reduction) const {
  const auto chosen = domain_.partition.reduce_dtype;
  if (chosen == c10::ScalarType::Undefined || !c10::isFloatingType(reduction.dtype)) return std::nullopt;
  return chosen;
}

/// `elements` of the gradient from `begin` on, in plain memory, then zeros up to `length`.
at::Tensor Reducer::part_of(const Reduction& reduction, std::size_t begin, std::size_t elements,
                            std::size_t length) const {
  const auto n = static_cast<std::int64_t>(length);
  if (!reduction.gradient.defined()) return at::zeros({n}, options(reduction.identity.made_in));
  auto* segment = segment_of(reduction.gradient);
  if (!segment && elements == length) return reduction.gradient.narrow(0, static_cast<std::int64_t>(begin), n);
  at::Tensor part = at::empty({n}, options(reduction.identity.made_in));
  at::Tensor filled = part.narrow(0, 0, static_cast<std::int64_t>(elements));
  part.narrow(0, filled.numel(), n - filled.numel()).zero_();
  if (!segment) {
    filled.copy_(reduction.gradient.narrow(0, static_cast<std::int64_t>(begin), filled.numel()));
    return part;
  }
  if (const auto coming = segment->pending(); coming && coming->comes_in_parts()) {
    coming->write_part(begin, filled);
    return part;
  }
  const std::size_t page_elements = segment->page_bytes() / part.itemsize(), end = begin + elements;
  for (std::size_t at = begin, next = 0; at < end; at = next) {
    const std::size_t page = at / page_elements;
    next = std::min(end, (page + 1) * page_elements);
    PagePin pin = segment->cache()->pin_page(*segment, page, Access::read);
    pin.wait();
    const at::Tensor piece = at::from_blob(
        pin.data() + (at - page * page_elements) * part.itemsize(), {static_cast<std::int64_t>(next - at)},
        [](void*) {}, part.options(), domain_.device);
    part.narrow(0, static_cast<std::int64_t>(at - begin), piece.numel()).copy_(piece);
  }
  return part;
}

/// Sends pages whose memory already has the layout and dtype to send, the same ones on every rank; the others are to
/// be packed.
void Reducer::send_pages(const ReductionPtr& reduction, std::vector<PackedPart>& to_pack) {
  const Stripes& stripes = reduction->stripes;
  const bool as_it_is = wire_dtype(*reduction) == reduction->identity.made_in;
  for (std::size_t page = 0; page < stripes.pages(); ++page) {
    const std::size_t part = stripes.part(page), begin = stripes.page_begin(page), all = part * stripes.ranks();
    if (!as_it_is || begin + all > stripes.elements()) {
      to_pack.push_back({reduction, page});
      continue;
    }
    at::Tensor whole = part_of(*reduction, begin, all, all);
    const Subject subject{"gradient", reduction->identity.key, page};
    auto piece = std::make_unique<Piece>();
    piece->parts.push_back({reduction, 0, stripes.part_begin(page), part});
    piece->elements = part;
    piece->bytes = whole.nbytes();
    piece->ends_together = ranks_.ends_together(rounding_of(*piece));
    piece->work = ranks_.reduce_scatter(std::move(whole), rounding_of(*piece), subject);
    push(std::move(piece));
  }
}

/// The mean is rounded to the dtype that the program has chosen for sums, else to its own.
Collectives::Rounding Reducer::rounding_of(const Piece& piece) const {
  const Reduction& reduction = *piece.parts[0].reduction;
  Collectives::Rounding rounding{chosen_dtype(reduction).value_or(reduction.dtype), piece.settled()};
  const bool has_bits = reduction.scattered && rounding.settled.empty() && rounding.dtype != at::kDouble;
  if (has_bits && c10::isFloatingType(rounding.dtype)) rounding.bits = domain_.partition.reduce_bits;
  return rounding;
}

/// Reduce-scatters of the parts of many pages, one behind another, in pieces of about a bucket.
void Reducer::send_packed_parts(const std::vector<PackedPart>& parts) {
  for_each_dtype(parts, [&](c10::ScalarType dtype, const std::vector<PackedPart>& alike) {
    const std::size_t item = c10::elementSize(dtype) * ranks_.size();
    std::vector<PackedPart> some;
    std::size_t bytes = 0;
    for (const PackedPart& part : alike) {
      some.push_back(part);
      bytes += part.reduction->stripes.part(part.page) * item;
      if (bytes >= domain_.bucket_bytes) send_packed_piece(std::exchange(some, {}), dtype), bytes = 0;
    }
    if (!some.empty()) send_packed_piece(some, dtype);
  });
}

/// One reduce-scatter: the parts of each rank, one after another.
void Reducer::send_packed_piece(const std::vector<PackedPart>& parts, c10::ScalarType dtype) {
  std::int64_t length = 0;
  for (const auto& [reduction, page] : parts) length += static_cast<std::int64_t>(reduction->stripes.part(page));
  at::Tensor packed = at::zeros({ranks_.size(), length}, options(dtype));
  auto piece = std::make_unique<Piece>();
  std::int64_t at = 0;
  for (const auto& [reduction, page] : parts) {
    const Stripes& stripes = reduction->stripes;
    const auto part = static_cast<std::int64_t>(stripes.part(page));
    if (reduction->gradient.defined()) {
      const auto begin = static_cast<std::int64_t>(stripes.page_begin(page));
      const auto elements = std::min(part * ranks_.size(), static_cast<std::int64_t>(stripes.elements()) - begin);
      const std::int64_t full = elements / part, rest = elements % part;  // ranks with a full part
      const at::Tensor all = part_of(*reduction, begin, elements, elements);
      packed.narrow(0, 0, full).narrow(1, at, part).copy_(all.narrow(0, 0, full * part).view({full, part}));
      if (rest > 0) packed[full].narrow(0, at, rest).copy_(all.narrow(0, full * part, rest));
    }
    piece->parts.push_back(
        {reduction, static_cast<std::size_t>(at), stripes.part_begin(page), static_cast<std::size_t>(part)});
    at += part;
  }
  piece->elements = static_cast<std::size_t>(length);
  piece->is_packed = true;
  piece->bytes = packed.nbytes();
  piece->ends_together = ranks_.ends_together(rounding_of(*piece));
  piece->work = ranks_.reduce_scatter(packed.view({-1}), rounding_of(*piece),
                                      {"gradients", parts[0].reduction->identity.key, parts[0].page});
  push(std::move(piece));
}

/// All-reduces of whole gradients, one behind another, in pieces of at most a bucket.
void Reducer::send_packed_wholes(const std::vector<PackedPart>& wholes) {
  for_each_dtype(wholes, [&](c10::ScalarType dtype, const std::vector<PackedPart>& alike) {
    const std::size_t most = std::max<std::size_t>(domain_.bucket_bytes / c10::elementSize(dtype), 1);
    auto piece = std::make_unique<Piece>();
    const auto send = [&] { send_packed_whole(std::exchange(piece, std::make_unique<Piece>()), dtype); };
    for (const auto& [reduction, _] : alike) {
      const std::size_t elements = reduction->stripes.elements();
      for (std::size_t begin = 0; begin < elements;) {
        const std::size_t n = std::min(elements - begin, most - piece->elements);
        piece->parts.push_back({reduction, piece->elements, begin, n});
        piece->elements += n, begin += n;
        if (piece->elements == most) send();
      }
    }
    if (piece->elements > 0) send();
  });
}

void Reducer::send_packed_whole(std::unique_ptr<Piece> piece, c10::ScalarType dtype) {
  const std::size_t ranks = ranks_.size();
  piece->elements = (piece->elements + ranks - 1) / ranks * ranks;  // equal parts
  at::Tensor packed = at::zeros({static_cast<std::int64_t>(piece->elements)}, options(dtype));
  for (const auto& [reduction, at, begin, elements] : piece->parts) {
    if (!reduction->gradient.defined()) continue;
    packed.narrow(0, static_cast<std::int64_t>(at), static_cast<std::int64_t>(elements))
        .copy_(part_of(*reduction, begin, elements, elements));
  }
  piece->ends_together = ranks_.sums_in_parts(dtype) || replicas_;
  piece->is_packed = true;
  piece->bytes = packed.nbytes();
  const PiecePart& first = piece->parts[0];
  const Subject subject{"gradients", first.reduction->identity.key, first.begin};
  piece->work = ranks_.all_reduce(std::move(packed), rounding_of(*piece), subject);
  push(std::move(piece));
}

void Reducer::for_each_dtype(const std::vector<PackedPart>& parts,
                             c10::function_ref<void(c10::ScalarType, const std::vector<PackedPart>&)> send) const {
  // All parts of a piece also have means of one dtype.
  std::map<std::pair<c10::ScalarType, c10::ScalarType>, std::vector<PackedPart>> alike;
  for (const PackedPart& part : parts) {
    alike[{wire_dtype(*part.reduction), part.reduction->dtype}].push_back(part);
  }
  for (const auto& [dtypes, of_dtypes] : alike) send(dtypes.first, of_dtypes);
}

at::TensorOptions Reducer::options(c10::ScalarType dtype) const {
  return at::TensorOptions().dtype(dtype).device(domain_.device);
}

// --- arriving ---

void Reducer::push(std::unique_ptr<Piece> piece) {
  for (const PiecePart& part : piece->parts) ++part.reduction->pieces_left;
  bytes_under_way_ += piece->bytes;
  bytes_awaited_ += piece->bytes;
  awaited_.push_back({piece->bytes, piece->ends_together || replicas_});
  ++pieces_;
  for (const PiecePart& part : piece->parts) part.reduction->last_piece = pieces_;
  // The time that packing took.
  if (domain_.planned_on && piece->is_packed) domain_.planned_on->copy(2 * piece->bytes);
  Piece* const earlier = under_way_.empty() ? nullptr : under_way_.back().get();
  under_way_.push_back(std::move(piece));
  try {
    if (earlier && !earlier->arrived) earlier->work->advance();
    make_room();
  } catch (const Error&) {
    // Nothing is lost. The sender first sends the rest, since other ranks wait for it. Then it calls make_room()
    // again, which throws again or continues.
  }
}

/// All ranks receive pieces at the same places of the program, also one that fails to deliver an earlier piece: the
/// last part of a sum may be a collective of its own.
void Reducer::make_room() {
  // A large gradient's sums take their time while the next one is computed. One in tiles does not fit in memory.
  const std::size_t most = std::max(kBucketsUnderWay * domain_.bucket_bytes, largest_);
  while (bytes_awaited_ > most) receive_next();
  while (bytes_under_way_ > most && !is_answering_) complete_oldest();
}

void Reducer::complete(Reduction& reduction) {
  receive_all_of(reduction);
  reduction.widen();
}

void Reducer::receive_all_of(const Reduction& reduction) {
  std::lock_guard lock(mutex_);
  NoPagingGuard no_paging;
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  if (backwards_ > 0 && !in_backward && !can_read_alone(reduction)) {
    throw RankError("a gradient is read by another thread while backward makes gradients: read it after backward");
  }
  if (in_backward) {
    together([&] { send_for_reading(reduction); });
  } else if (!reduction.sent && !reduction.failed) {
    together([&] { send_open(); });
  }
  if (reduction.failed) {
    throw RankError(
        "the backward that made this gradient ended in an error before ranks had summed it; clear it with "
        "zero_grad()");
  }
  while (reduction.pieces_left > 0) complete_oldest();
}

/// Strong guarantee: on an error the piece stays the oldest.
void Reducer::complete_oldest() {
  Piece& piece = *under_way_.front();
  receive(piece);
  for (; piece.part < piece.parts.size(); ++piece.part) {
    deliver(piece);
    piece.target = 0;
    Reduction& reduction = *piece.parts[piece.part].reduction;
    --reduction.pieces_left;
    finish(reduction);
  }
  bytes_under_way_ -= piece.bytes;
  under_way_.pop_front();
}

/// Whether ranks have yet to receive a piece, up to this one, that needs all of them at one place of the program.
bool Reducer::must_receive_together(std::uint64_t up_to) const {
  std::uint64_t number = pieces_ - awaited_.size();
  return std::ranges::any_of(awaited_,
                             [&](const Awaited& piece) { return ++number <= up_to && piece.ends_together; });
}

/// Whether a read of the gradient needs nothing more from other ranks at this place: also, if it has failed.
bool Reducer::can_read_alone(const Reduction& reduction) const {
  return reduction.failed || (reduction.sent && !must_receive_together(reduction.last_piece));
}

/// Receives the oldest awaited piece. All ranks call it at the same places.
void Reducer::receive_next() {
  const std::uint64_t left = awaited_.size();  // it is the last but so many of all pieces
  if (left <= under_way_.size()) receive(*under_way_[under_way_.size() - left]);
  bytes_awaited_ -= awaited_.front().bytes;
  awaited_.pop_front();
}

/// Waits until the piece's result is here.
void Reducer::receive(Piece& piece) {
  if (piece.arrived) return;
  piece.work->wait();
  if (replicas_ && !piece.over_replicas) {
    const Subject subject{"gradients", piece.parts[0].reduction->identity.key, 0};
    const Collectives::Rounding rounding = rounding_of(piece);
    at::Tensor here = at::empty({static_cast<std::int64_t>(piece.elements)}, options(rounding.dtype));
    piece.work->take(here, 0);
    piece.work = replicas_->all_reduce(std::move(here), rounding, subject);
    piece.work->wait();
    piece.over_replicas = true;
  }
  piece.arrived = true;
}

/// Delivers the piece's next part to each of its living targets.
void Reducer::deliver(Piece& piece) {
  const PiecePart& part = piece.parts[piece.part];
  Reduction& reduction = *part.reduction;
  reduction.arrived = true;
  for (; piece.target < reduction.targets.size(); ++piece.target, piece.element = 0) {
    const Reduction::Target& target = reduction.targets[piece.target];
    const auto storage = target.storage.lock();
    StorageSegment* segment = storage ? segment_of(*storage) : nullptr;
    if (!segment) continue;
    std::size_t begin = part.begin, elements = part.elements;
    if (reduction.scattered) {
      const std::size_t own = reduction.stripes.own();
      elements = std::min(elements, own - std::min(own, begin));
      segment->claim_share(target.add ? Access::write : Access::overwrite);
      if (segment->is_partitioned()) {
        segment = &segment->share_segment();
      } else {
        begin = reduction.stripes.in_tensor(begin);
      }
    }
    const std::size_t in_result = part.in_result;
    write(
        *segment, begin, reduction.dtype, elements, piece.element,
        [&](const at::Tensor& slice, std::size_t at) {
          piece.work->take(slice, in_result + at, target.add);
          // Several targets would have several norms.
          if (reduction.squares && reduction.targets.size() == 1) reduction.squares->add(slice, part.begin + at);
        },
        target.add);
  }
}

/// Ends the wait of a reduction's targets once all of it was delivered.
void Reducer::finish(Reduction& reduction) {
  if (!reduction.sent || reduction.pieces_left > 0) return;
  reduction.delivered = true;
  if (reduction.is_last) to_update_.push_back(reduction.identity.key);
  if (reduction.is_narrow) to_widen_.push_back(reduction.shared_from_this());
  for (const Reduction::Target& target : reduction.targets) {
    const auto storage = target.storage.lock();
    StorageSegment* segment = storage ? segment_of(*storage) : nullptr;
    if (!segment) continue;
    segment->has_come(reduction);
    if (reduction.squares && !reduction.is_narrow && reduction.scattered && reduction.targets.size() == 1) {
      reduction.squares->foresee(*segment);
    }
    if (domain_.offloads_updates()) segment->at_home().cache()->bring_down(segment->at_home());
  }
}

/// Writes `count` elements of a segment from `begin` on, page by page, or adds to them. `fill(slice, at)` writes the
/// slice that begins `at` elements after `begin`. Skips the first `done` elements, and updates `done` as it goes.
template <class Fill>
void Reducer::write(StorageSegment& segment, std::size_t begin, c10::ScalarType dtype, std::size_t count,
                    std::size_t& done, Fill&& fill, bool adds) {
  const std::size_t item = c10::elementSize(dtype), page_elements = segment.page_bytes() / item;
  const std::size_t end = begin + count;
  for (std::size_t at = begin + done, next = 0; at < end; at = next) {
    const std::size_t page = at / page_elements;
    next = std::min(end, (page + 1) * page_elements);
    const bool all = !adds && (next - at) * item == segment.bytes_of(page);
    PagePin pin = segment.cache()->pin_page(segment, page, all ? Access::overwrite : Access::write);
    pin.wait();
    fill(at::from_blob(
             pin.data() + (at - page * page_elements) * item, {static_cast<std::int64_t>(next - at)}, [](void*) {},
             options(dtype), domain_.device),
         at - begin);
    done = next - begin;
  }
}

}  // namespace zeropage
