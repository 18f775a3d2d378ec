// Paged tensors: ordinary tensors whose storage holds a segment instead of data, and whose key set carries one more
// key, so that every operator that touches them comes to the fallback first.
//
// [Note: where a segment hangs] The segment is the context of the storage's DataPtr. It lives as long as the storage:
// when the last tensor dies, its pages are given back, with no table to clean. Views, detach() and saved tensors
// share the storage and inherit the key. Outside a pin the storage's pointer is null and guarded: raw access throws.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zeropage/base/torch_compat.h"
#include "zeropage/comm/collectives.h"
#include "zeropage/comm/stripes.h"
#include "zeropage/pager/frame_cache.h"
#include "zeropage/tensor/foreseen_norm.h"
#include "zeropage/tensor/leaves.h"
#include "zeropage/tensor/placement.h"

namespace zeropage {

/// Where a role's tensors are created. `automatic`: on the device if it has memory of its own, and in the host, while
/// half of their budgets has room; else on disk. `automatic_below`: the same, and never on the device.
enum class TierChoice : std::uint8_t { device, host, disk, automatic, automatic_below };

/// Operators that brought their tensors in whole although a rule is there for their kind: no slow path is silent.
class GeneralPath {
 public:
  void count(const std::string& name) {
    std::lock_guard lock(mutex_);
    ++counts_[name];
  }
  std::vector<std::pair<std::string, std::size_t>> counts() const {
    std::lock_guard lock(mutex_);
    return {counts_.begin(), counts_.end()};
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::size_t> counts_;
};

/// How a tensor lies over the ranks.
enum class Layout : std::uint8_t {
  replicated,   // whole on every rank. Its own share is always current there; the others may be stale
  partitioned,  // at home on every rank is that rank's share alone; the whole is gathered when an operator needs it
};

/// Over which ranks a space's tensors lie, and how.
struct Partition {
  std::shared_ptr<Collectives> ranks;     // null: one process
  std::shared_ptr<Collectives> replicas;  // of hybrid partitioning: ranks that hold the same shares; null: none
  bool partitions[kRoles] = {};           // roles that are partitioned; the others are replicated
  bool reduces_whole = false;             // gradients are summed whole on every rank (stage 0)
  c10::ScalarType reduce_dtype = c10::ScalarType::Undefined;  // of gradients on the wire; Undefined: their own

  int world() const { return ranks ? ranks->size() * (replicas ? replicas->size() : 1) : 1; }
};

/// How the moments of fused optimizers are kept (rules/quantised.h).
enum class Moments : std::uint8_t { as_they_are, bfloat16, blocks8 };

/// Whether updates run under backward, before the step asks for them (rules/speculation.h). `always`: where it cannot
/// pay too, and where they were dropped before, which tests want.
enum class EarlyUpdate : std::uint8_t { never, automatic, always };

/// Operators whose operand is too large to be whole (rules/tiled_operators.cpp). `exact`: no sum in another order.
enum class Tiling : std::uint8_t { off, automatic, exact };

class StorageSegment;
struct SegmentBuilder;

/// Content that is still to come: a gradient whose reduction is under way.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Returns when it is there.
  virtual void complete() = 0;
  /// True if instead of `from` being waited for and added to `sum`, what comes will be. `from` must hold nothing
  /// else.
  virtual bool add_to(StorageSegment& sum, const StorageSegment& from) = 0;
};

/// What the content of a float32 tensor is kept as.
struct Quantisation {
  at::Tensor codes;        // of the tensor's shape: bfloat16, or uint8
  at::Tensor scales;       // float32, one for each kQuantum codes of uint8
  bool is_signed = true;   // of uint8
  std::uint32_t seed = 0;  // of the latest rounding
  bool is_seeded = false;  // by the optimizer's step
};

/// Operators on segments that have yet to run.
class Deferred {
 public:
  virtual ~Deferred() = default;
  /// Returns when they have run. Throws what they threw; what is left to run then stays. False: they are running
  /// already, further up on this thread.
  virtual bool run() = 0;
  /// A segment's tensor died: true if the segment must outlive it, and does so here.
  virtual bool keep_alive(std::unique_ptr<StorageSegment>& segment) = 0;
  /// All that comes of them is temporaries, which are made when an operator asks for them.
  virtual bool can_wait() const = 0;
  /// Calls `visit` for each segment that has a home and of which they read or write.
  virtual void for_each_segment(c10::function_ref<void(StorageSegment&)> visit) const = 0;
  /// What it will do to the content of `segment`.
  virtual Access access_to(const StorageSegment& segment) const = 0;
  /// Whether they are to run on the host, in the memory below the device's.
  virtual bool runs_in_host() const = 0;
  /// No more operators join them.
  virtual void seal() = 0;
  /// How many they are.
  virtual std::size_t length() const = 0;
  /// What was written ahead of them becomes the content, if it is what they make, or is discarded.
  virtual void settle() = 0;
};

/// Is told when what was deferred on a segment has run.
class Awaiter {
 public:
  virtual ~Awaiter() = default;
  /// Under the domain's deferral_mutex.
  virtual void has_run(StorageSegment& segment) noexcept = 0;
};

/// What was written to segments ahead of operators that would write it, into second versions of them
/// (rules/speculation.h). Under the domain's deferral_mutex.
class WrittenAhead {
 public:
  virtual ~WrittenAhead() = default;
  /// The segments are what they were. Nothing while it is being written, further up on this thread.
  virtual void discard() = 0;
};

class Machine;

/// What all tensors of one space share.
struct Domain {
  std::shared_ptr<Machine> planned_on;   // null: content is real
  std::shared_ptr<FrameCache> cache;     // of what this rank holds
  std::shared_ptr<FrameCache> gathered;  // of wholes that are gathered from all ranks' shares; null: none
  c10::Device device{c10::kCPU};
  bool on_host = true;             // operators run on the host's memory
  std::size_t min_page_bytes = 0;  // bytes; smaller tensors stay ordinary, or, with ranks, whole in memory
  TierChoice tiers[kRoles] = {};
  Partition partition;
  // Of parameters, where what operators see differs from the master; Undefined: nowhere.
  c10::ScalarType compute_dtype = c10::ScalarType::Undefined, master_dtype = c10::kFloat;
  c10::ScalarType gradient_dtype = c10::kFloat;  // of gradients of such parameters
  Moments moments = Moments::as_they_are;
  bool shares_pages = true;  // several small tensors one page
  std::uint32_t quantisations = 0;
  bool homes_in_files = true;     // what is loaded from files stays there until it is written
  bool saves_masters = true;      // state_dict() gives masters, not what operators see
  bool keeps_hi_lo = false;       // a master is what operators see, and beside it what it lacks
  std::shared_ptr<void> reducer;  // of gradients: train/ owns what it is
  GeneralPath unpaged_operators;
  Tiling tiling = Tiling::automatic;
  std::size_t tile_above = 0;    // bytes
  bool async_step = true;        // what an optimizer's step defers may run after it has returned
  bool updates_in_host = false;  // an optimizer's states that are not at home on the device are updated in the host
  bool updates_where_all_fits = false;  // but on the device as long as it holds everything
  /// Held while operators are deferred, and while deferred ones run.
  std::recursive_mutex deferral_mutex;
  std::vector<std::weak_ptr<Deferred>> deferred;  // in the order of their making
  std::size_t deferred_alive = 0;                 // of them, when last counted
  std::size_t next_deferred = 0;                  // where all of them are being run; 0: they are not
  EarlyUpdate early_update = EarlyUpdate::never;
  // Updates of a parameter that ran so, those of them that the step asked for, and the bytes that the others wrote.
  std::atomic<std::size_t> early_updates = 0, updates_committed = 0, wasted_bytes = 0;
  std::atomic<std::size_t> not_finite = 0;  // values in gradients that updates have met
  // Elements of parameters, of a device with memory of its own: where they were updated.
  std::atomic<std::size_t> updated_in_host = 0, updated_on_device = 0;
  std::mutex sharing_mutex;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> created;  // in a scope; ranks have yet to make them equal
  std::map<std::uint64_t, c10::weak_intrusive_ptr<c10::StorageImpl>> stale;  // parameters, by number
  std::uint64_t creations = 0;
  ContractLog contract;  // of what is to stay the same on all ranks
  Leaves leaves;         // that operators have met

  /// Where the content of a tensor lies that a loader mapped from a file, if its home may be there; else none.
  SourceRange find_source(const at::TensorBase& tensor) const;
  /// Whether updates run in the host now.
  bool offloads_updates() const { return updates_in_host && !(updates_where_all_fits && cache->holds_everything()); }
  bool mixes() const { return compute_dtype != c10::ScalarType::Undefined; }
  /// With ranks every tensor is ours, for its gradient must be reduced, and with mixed precision, for its dtype must
  /// be that of the others; small ones stay in memory.
  bool pages(std::size_t bytes) const { return bytes > 0 && (partition.ranks || mixes() || bytes >= min_page_bytes); }
  /// Whether a tensor is too small to partition. By elements, so that tensors of one shape agree whatever their
  /// dtype.
  bool keeps_whole(std::size_t elements) const { return elements * 4 < min_page_bytes; }
  Layout layout_for(Role role, std::size_t elements) const {
    return partition.partitions[static_cast<int>(role)] && !keeps_whole(elements) ? Layout::partitioned
                                                                                  : Layout::replicated;
  }
  Stripes stripes(std::size_t elements) const {
    return {elements, cache->page_bytes(), partition.ranks->size(), partition.ranks->rank()};
  }
};

/// Elements beside which a segment was zero when its content was `content`.
struct NonZero {
  struct Range {
    std::size_t begin, end;
  };
  std::vector<Range> ranges;  // in order, apart from each other
  std::vector<Range> fresh;   // of these, where nothing was added yet: only there may be -0
  ContentMark content;
};

class StorageSegment final : public Segment {
 public:
  StorageSegment(std::shared_ptr<Domain> domain, c10::StorageImpl* storage, Role role, std::size_t elements);
  ~StorageSegment() override;

  const std::shared_ptr<Domain>& domain() const { return domain_; }
  Role role() const { return role_; }

  /// Calls of operators that wrote it, or may have.
  std::uint64_t writes() const { return writes_.load(std::memory_order_relaxed); }
  void note_write() { writes_.fetch_add(1, std::memory_order_relaxed); }

  // --- deferred operators ---

  /// Operators that read or write it have yet to run.
  bool is_deferred() const { return is_deferred_.load(std::memory_order_acquire); }
  bool will_change() const override { return is_deferred(); }
  bool will_change_below() const override { return is_deferred_in_host_.load(std::memory_order_acquire); }
  /// Under the domain's deferral_mutex.
  const std::shared_ptr<Deferred>& deferred() const { return deferred_; }
  void defer(std::shared_ptr<Deferred> deferred);
  void run_deferred();
  /// Calls `awaiter` once, when what is deferred now has run; false, and not at all, if nothing is.
  bool await_deferred(std::shared_ptr<Awaiter> awaiter);
  /// What those operators do to its content; `read` if there are none, or they have begun.
  Access deferred_access() const;
  /// What was written ahead becomes the content, or is discarded. Before an operator takes the segment, and before it
  /// is pinned.
  void settle();
  void set_written_ahead(std::shared_ptr<WrittenAhead> ahead);
  const std::shared_ptr<WrittenAhead>& written_ahead() const { return written_ahead_; }
  /// Of a parameter, what rules/speculation.h knows of its updates. Under the domain's deferral_mutex.
  std::shared_ptr<void> update_habit;
  /// True until find_home() gives it a home (Creation::unallocated).
  bool is_unallocated() const { return unallocated_.load(std::memory_order_acquire); }
  /// The most bytes that an operator may hold of the cache in which it lies, or will.
  std::size_t frame_limit() const { return (is_unallocated() ? domain_->cache : cache())->frame_limit(); }
  void find_home();
  /// If its content is kept in fewer bits, how; else null. It has then no home of its own.
  Quantisation* quantisation() const { return quantisation_.get(); }
  void set_quantisation(std::unique_ptr<Quantisation> quantisation) { quantisation_ = std::move(quantisation); }

  // --- gradients ---

  /// Of a leaf: what its gradients are asked for.
  const std::shared_ptr<NormHabit>& norm_habit();
  /// Of a gradient; null: nothing is known.
  ForeseenNorm* foreseen_norm() const { return foreseen_norm_.get(); }
  void set_foreseen_norm(std::unique_ptr<ForeseenNorm> norm) { foreseen_norm_ = std::move(norm); }
  ContentMark content_mark() const;
  /// Of a gradient, where it is not zero; null: nothing is known.
  const NonZero* nonzero() const {
    return nonzero_ && nonzero_->content == content_mark() ? nonzero_.get() : nullptr;
  }
  void set_nonzero(std::unique_ptr<const NonZero> nonzero) { nonzero_ = std::move(nonzero); }

  // --- mixed precision ---

  /// The tensor of the same shape that holds the content more precisely, and from which this one follows, or, of
  /// int16, what this one lacks (rules/hi_lo.h); undefined: none.
  const at::Tensor& master() const { return master_; }
  void set_master(at::Tensor master) { master_ = std::move(master); }
  /// Of a master: the storage of what operators see; null if there is none, or it died.
  c10::intrusive_ptr<c10::StorageImpl> visible() const {
    return visible_ ? visible_->lock() : c10::intrusive_ptr<c10::StorageImpl>();
  }
  void set_visible(const StorageSegment& visible) { visible_.emplace(visible.storage()); }
  /// A tensor over all of the storage, which is alive.
  at::Tensor whole_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, caffe2::TypeMeta dtype) const;

  // --- over ranks ---

  bool is_partitioned() const { return share_.defined(); }
  /// What ranks know of its value (placement.h).
  Placement placement() const { return pending_ ? Placement::sum : is_own() ? Placement::own : Placement::same; }
  /// A tensor of this rank alone has no number: a share of another, or what waits for other ranks.
  bool is_own() const { return own_ || (number_ == 0 && domain_->partition.ranks); }
  /// Of one that is whole here: it is this rank's own from now on.
  void become_own() { own_ = true; }
  /// Whether the program keeps it the same on all ranks, whatever it writes: a parameter, or an optimizer's state.
  bool keeps_same() const { return keeps_same_; }
  /// And its master.
  void set_keeps_same(bool keeps);
  /// Whether it is a gradient that the reducer made.
  bool is_reduced() const { return is_reduced_; }
  void set_reduced() { is_reduced_ = true; }
  /// Whether anything but zeros was ever written to it.
  bool is_touched() const { return touched_; }
  /// A number for a tensor that is made like this one, where not all ranks may make as many others.
  std::uint64_t derived_number() const;
  bool is_stale() const { return stale_; }
  void set_stale(bool stale);
  /// Whether the ranks' shares of it can be written one by one.
  bool is_shareable() const { return shareable_ && !own_; }
  const Stripes& stripes() const { return stripes_; }
  std::uint64_t number() const { return number_; }
  std::size_t elements() const { return elements_; }
  c10::weak_intrusive_ptr<c10::StorageImpl> storage() const;
  /// Of a partitioned tensor: this rank's share, flat, stripes().own() elements.
  const at::Tensor& share() const { return share_; }
  StorageSegment& share_segment() const;
  /// The segment whose bytes are at home on this rank: that of its share, if it is partitioned, else this one.
  const StorageSegment& at_home() const { return is_partitioned() ? share_segment() : *this; }
  StorageSegment& at_home() { return is_partitioned() ? share_segment() : *this; }
  /// What was deferred runs, and content that is still to come is waited for.
  void complete();
  /// The second of these alone.
  void complete_pending();
  /// Makes ready for operators that take the tensor whole: what is to come is there, and all shares are current.
  void refresh(Access access);
  /// Makes ready for operators that take this rank's share alone.
  void open_share(Access access);
  /// The same for the reducer, which brings what is to come.
  void claim_share(Access access);
  /// Whether the domain knows the leaf that lies in it.
  bool leaf_known = false;
  void will_come(std::shared_ptr<Pending> pending) { pending_ = std::move(pending); }
  Layout layout() const;
  const std::shared_ptr<Pending>& pending() const { return pending_; }

  /// Where the segment would lie if all paged tensors of the process lay in one address space: its own range, for
  /// code that tells shared tensors by their addresses. No memory is there.
  std::uint64_t virtual_address() const { return virtual_address_; }
  static void destroy(void* segment);  // the DataPtr's deleter

 protected:
  void expose(std::byte* data) override;
  void hide() override;

 private:
  friend struct SegmentBuilder;
  friend void take_segment(const at::Tensor& tensor, const at::Tensor& made);
  void point_to(void* data);
  Layout layout_of(const SegmentBuilder& builder) const;
  std::shared_ptr<Domain> domain_;
  c10::StorageImpl* storage_;  // null: it died, and deferred operators keep the segment
  Role role_;
  std::uint64_t virtual_address_;
  std::size_t elements_;
  std::uint64_t number_ = 0;
  Stripes stripes_;
  at::Tensor master_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> visible_;
  at::Tensor share_;
  bool shareable_ = false;
  bool stale_ = false;
  bool own_ = false, keeps_same_ = false, is_reduced_ = false, touched_ = false;
  mutable std::atomic<std::uint64_t> derived_ = 0;
  std::shared_ptr<Pending> pending_;
  std::atomic<bool> is_deferred_ = false, is_deferred_in_host_ = false;
  std::shared_ptr<Deferred> deferred_;
  std::shared_ptr<Awaiter> awaiter_;
  std::atomic<bool> is_written_ahead_ = false;
  std::shared_ptr<WrittenAhead> written_ahead_;
  std::unique_ptr<const SegmentBuilder> builder_;  // of what has, or had, no home; threads may ask it meanwhile
  std::atomic<bool> unallocated_ = false;
  std::unique_ptr<Quantisation> quantisation_;
  std::shared_ptr<NormHabit> norm_habit_;
  std::unique_ptr<ForeseenNorm> foreseen_norm_;
  std::unique_ptr<const NonZero> nonzero_;
  std::atomic<std::uint64_t> writes_ = 0;
};

/// The segment behind `tensor`, or null if it is not paged. No lock, no lookup.
inline StorageSegment* segment_of(c10::StorageImpl& storage) {
  const auto& data = storage._mutable_data_ptr_no_checks();
  return data.get_deleter() == &StorageSegment::destroy ? static_cast<StorageSegment*>(data.get_context()) : nullptr;
}
inline StorageSegment* segment_of(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kPagedKey) || !tensor.has_storage()) return nullptr;
  return segment_of(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

/// True if `tensor` is all of its storage, each element once: its bytes in memory order are the segment's.
bool is_whole(const at::TensorBase& tensor);

/// How a tensor is created over ranks.
struct Creation {
  std::optional<Layout> layout = std::nullopt;  // the role's, unless it is said
  /// What it is called on all ranks. Given where ranks may make tensors in another order, as gradients; else counted.
  std::uint64_t number = 0;
  /// What it is made like. Outside of steps and scopes its number comes from this one's: there ranks may make
  /// different tensors, as in a layer that only some of them run.
  const StorageSegment* like = nullptr;
  Placement placement = Placement::same;
  /// Has no home until find_home(): a temporary, which may die before an operator needs its content.
  bool unallocated = false;
  /// Shares no page with other tensors, however small.
  bool alone = false;
  /// Of this rank alone: other ranks know nothing of it.
  bool is_local = false;
  /// Where its content lies, if its tier is the disk (Domain::find_source).
  SourceRange source = {};
};

/// A paged tensor that reads as zeros. Takes no part in autograd until it is told to. Strides must be dense.
at::Tensor make_paged(const std::shared_ptr<Domain>& domain, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      caffe2::TypeMeta dtype, Role role, const Creation& creation = {});

/// The storage of `tensor` holds the segment of `made` from now on: what `made` holds, wherever that is, becomes the
/// content of all views of `tensor`. Both are paged, with as many bytes; nothing else may use `made`. Throws
/// AccessError if `tensor` is pinned.
void take_segment(const at::Tensor& tensor, const at::Tensor& made);

/// Runs everything that was deferred, in the order in which it was begun. Throws the first error.
void run_deferred(Domain& domain);
/// With ranks: what was created in a scope becomes the same on all of them. Shares are what their ranks made of them;
/// what is not partitioned comes from rank 0. Throws RankError.
void start_equal(Domain& domain);

/// Makes an existing tensor paged, in place, moving its content home. True if it is paged now; false if it stays as
/// it is: too small, another device, not strided, a subclass, or its storage is shared with tensors we do not know
/// of.
bool adopt(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, Role role);
/// The same, and where its storage is shared, as Module::to does: by giving it a storage of its own. One on another
/// device moves to the domain's. `number`: over ranks, what it is called on all of them; 0: it is counted.
bool page_tensor(const std::shared_ptr<Domain>& domain, at::Tensor& tensor, Role role, std::uint64_t number = 0);

/// Segments of a set of tensors held in memory, exposed, while the guard lives.
class TensorPin {
 public:
  TensorPin() = default;
  explicit TensorPin(c10::ArrayRef<PinRequest> requests);
  TensorPin(TensorPin&& other) noexcept
      : requests_(std::move(other.requests_)),
        storages_(std::move(other.storages_)),
        thread_(other.thread_),
        exceptions_(other.exceptions_) {
    other.requests_.clear();
  }
  TensorPin& operator=(TensorPin&& other) noexcept {
    std::swap(requests_, other.requests_);
    std::swap(storages_, other.storages_);
    std::swap(thread_, other.thread_);
    std::swap(exceptions_, other.exceptions_);
    return *this;
  }
  /// If an exception ends the pin, tensors that were to be overwritten keep their earlier content.
  ~TensorPin() {
    if (!requests_.empty()) let_go(exceptions_ && std::uncaught_exceptions() > *exceptions_);
  }
  /// Lets go, and stores what was written to gathered tensors in this rank's share: after an operator that succeeded.
  void release();

 private:
  void let_go(bool failed);
  c10::SmallVector<PinRequest, 8> requests_;     // all of one cache after another's
  c10::SmallVector<c10::Storage, 8> storages_;   // of these: `tensor.data = other` may let go of them meanwhile
  std::uint64_t thread_ = this_thread_number();  // that took the pins
  std::optional<int> exceptions_;                // under way then; none if nothing is written
};

// --- the init scope: factories on this thread make paged tensors ---

/// While it lives, factories on this thread make ordinary tensors.
class OutsideScopes {
 public:
  OutsideScopes();
  ~OutsideScopes();
  OutsideScopes(const OutsideScopes&) = delete;
  OutsideScopes& operator=(const OutsideScopes&) = delete;

 private:
  std::shared_ptr<Domain> outer_;
  bool outer_included_;
};

/// The domain whose scope is entered on this thread, or null.
const std::shared_ptr<Domain>& scope_domain();

class InitScope {
 public:
  explicit InitScope(std::shared_ptr<Domain> domain);
  /// Leaves, unless leave() or abandon() did; while an exception is on its way, abandons.
  ~InitScope() noexcept(false);
  /// Ends the scope. With ranks, what was created in it becomes the same on all: throws RankError.
  void leave();
  /// Ends the scope without a word to other ranks, which may not have come as far: what was created is of no use.
  void abandon();
  InitScope(const InitScope&) = delete;
  InitScope& operator=(const InitScope&) = delete;

 private:
  std::shared_ptr<Domain> domain_;  // null: left
  std::shared_ptr<Domain> outer_;
  bool outer_included_;
};

}  // namespace zeropage
