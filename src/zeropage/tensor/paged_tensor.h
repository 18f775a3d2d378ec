// Paged tensors are ordinary tensors whose storage holds a segment instead of data. Their key set carries one more
// key, which sends every operator that touches them to the fallback first.
//
// [Note: where a segment hangs] The segment is the context of the storage's DataPtr. It lives as long as the storage.
// When the last tensor dies, the segment frees its pages; there is no table to clean. Views, detach() and saved
// tensors share the storage and inherit the key. Outside a pin the storage's pointer is null and guarded: raw access
// throws.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/torch_compat.h"
#include "zeropage/base/units.h"
#include "zeropage/comm/collectives.h"
#include "zeropage/comm/stripes.h"
#include "zeropage/kernels/formats.h"
#include "zeropage/pager/frame_cache.h"
#include "zeropage/tensor/foreseen_norm.h"
#include "zeropage/tensor/leaves.h"
#include "zeropage/tensor/open_scopes.h"
#include "zeropage/tensor/placement.h"

namespace zeropage {

/// The tier on which a role's tensors are created. `automatic` tries a device with memory of its own, then the host,
/// while half of their budgets has room, and then uses the disk. `automatic_below` does the same without the device.
enum class TierChoice : std::uint8_t { device, host, disk, automatic, automatic_below };

/// Counts operators that loaded whole tensors although their kind has a rule, so that no slow path is silent.
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

/// How a tensor is distributed over the ranks.
enum class Layout : std::uint8_t {
  replicated,   // Whole on every rank. A rank's own share is always current; the others may be stale.
  partitioned,  // Each rank's home holds its share alone. Operators that need the whole tensor gather it.
};

/// The ranks that share a space's tensors, and how they share them.
struct Partition {
  std::shared_ptr<Collectives> ranks;     // null: one process
  std::shared_ptr<Collectives> replicas;  // ranks that hold the same shares (hybrid partitioning); null: none.
  bool partitions[kRoles] = {};           // by role: partitioned, else replicated.
  bool reduces_whole = false;             // every rank sums whole gradients (stage 0).
  c10::ScalarType reduce_dtype = c10::ScalarType::Undefined;  // of gradients in transfer; Undefined: their own

  bool codes_gathers = false;                         // of parameters, in blocks of 8 bits (gather_dtype)
  std::optional<kernels::CodeBits> reduce_bits = {};  // of gradients on their way to other nodes; none: reduce_dtype

  int world() const { return ranks ? ranks->size() * (replicas ? replicas->size() : 1) : 1; }
};

/// The format that stores the moments of fused optimizers (rules/quantised.h).
enum class Moments : std::uint8_t { as_they_are, bfloat16, blocks8 };

/// Whether updates run during backward, before the step requests them (rules/speculation.h). `always` is for tests:
/// it also runs updates that cannot pay off, and those of parameters whose earlier updates were dropped.
enum class EarlyUpdate : std::uint8_t { never, automatic, always };

/// Whether operators split an operand that is too large to load at once (rules/tiled_operators.cpp). `exact` allows
/// no split that sums in another order.
enum class Tiling : std::uint8_t { off, automatic, exact };

class Refresher;
class StorageSegment;
struct SegmentBuilder;

/// Content that has not arrived yet: a gradient whose reduction is under way, or a parameter that ranks refresh.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Waits until the content is there.
  virtual void complete() = 0;
  /// Adds the content of `from` to `sum` on arrival, so that the caller need not wait for it. False: it cannot.
  /// `from` must hold nothing else.
  virtual bool add_to(StorageSegment& sum, const StorageSegment& from) = 0;
  /// Whether write_part() serves for the content. Then a reader of parts need not complete() it.
  virtual bool comes_in_parts() const { return false; }
  /// Writes elements [begin, begin + into.numel()) into flat plain memory of the content's dtype. In order, each is
  /// made once.
  virtual void write_part(std::size_t begin, const at::Tensor& into) {
    (void)begin, (void)into;
    TORCH_INTERNAL_ASSERT(false, "it does not come in parts");
  }
};

/// The low-precision encoding of a float32 tensor's content.
struct Quantisation {
  at::Tensor codes;        // bfloat16 or uint8, of the tensor's shape.
  at::Tensor scales;       // float32, one for each kQuantum codes of uint8; over ranks, of this rank's share
  bool is_signed = true;   // of uint8 codes.
  std::uint32_t seed = 0;  // of the latest rounding.
  bool is_seeded = false;  // the optimizer's step set the seed.
};

/// Operators on segments that have yet to run.
class Deferred {
 public:
  virtual ~Deferred() = default;
  /// Runs them. Rethrows their errors; operators that have not run stay deferred. False: they are running already,
  /// further up on this thread.
  virtual bool run() = 0;
  /// A segment's tensor died. True: these operators still need the segment and have taken it over.
  virtual bool keep_alive(std::unique_ptr<StorageSegment>& segment) = 0;
  /// True if they make only temporaries, which can wait until an operator needs them.
  virtual bool can_wait() const = 0;
  /// Calls `visit` for each segment with a home that they read or write.
  virtual void for_each_segment(c10::function_ref<void(StorageSegment&)> visit) const = 0;
  /// How they will access `segment`.
  virtual Access access_to(const StorageSegment& segment) const = 0;
  /// Whether the operators, or what is left of them, write it.
  virtual bool writes(const StorageSegment& segment) const = 0;
  /// Whether they will run on the host, in the memory below the device's.
  virtual bool runs_in_host() const = 0;
  /// Lets no more operators join them.
  virtual void seal() = 0;
  /// The number of operators.
  virtual std::size_t length() const = 0;
  /// Commits an early update's shadow copies if these operators make the same content, else discards them.
  virtual void settle() = 0;
  /// Lets them run in between the next operators, window by window, when pages are there. Nothing joins them then.
  virtual void open() = 0;
  /// For a program in Domain::opened: runs the part that needs no wait. Throws as run() does. True: all have run.
  /// A program that still waits to begin does so only if `may_begin`.
  virtual bool advance(bool may_begin) = 0;
};

/// A callback for the moment when a segment's deferred operators have run.
class Awaiter {
 public:
  virtual ~Awaiter() = default;
  /// Called under the domain's deferral_mutex. `failure`: the operators' error, after which the rest was given up.
  virtual void has_run(StorageSegment& segment, std::exception_ptr failure) noexcept = 0;
};

/// Shadow copies of segments that an early update wrote before its operators were called (rules/speculation.h).
/// Used under the domain's deferral_mutex.
class WrittenAhead {
 public:
  /// While it lives, this thread uses shares without telling the cache of gathered tensors, whose contents stay as
  /// they are until the step. Other ranks may update nothing ahead, and all must gather alike.
  class OfShares {
   public:
    OfShares() : before_(std::exchange(is_here_, true)) {}
    ~OfShares() { is_here_ = before_; }
    OfShares(const OfShares&) = delete;
    OfShares& operator=(const OfShares&) = delete;
    static bool is_here() { return is_here_; }

   private:
    static thread_local bool is_here_;
    const bool before_;
  };

  virtual ~WrittenAhead() = default;
  /// Drops the shadow copies. Does nothing while the update that writes them runs, further up on this thread.
  virtual void discard() = 0;
};

class Machine;
class UpdateBalance;

/// The state that all tensors of one space share.
struct Domain {
  std::shared_ptr<Machine> planned_on;   // null: content is real.
  std::shared_ptr<FrameCache> cache;     // of this rank's tensors and shares.
  std::shared_ptr<FrameCache> gathered;  // of tensors gathered from all ranks' shares; null: none.
  c10::Device device{c10::kCPU};
  bool on_host = true;             // operators run on the host's memory.
  std::size_t min_page_bytes = 0;  // bytes. Smaller tensors stay ordinary, or, with ranks, whole in memory.
  TierChoice tiers[kRoles] = {};
  Partition partition;
  // Dtypes of parameters with masters; compute_dtype Undefined: none have one.
  c10::ScalarType compute_dtype = c10::ScalarType::Undefined, master_dtype = c10::kFloat;
  c10::ScalarType gradient_dtype = c10::kFloat;  // of gradients of such parameters
  Moments moments = Moments::as_they_are;
  bool shares_pages = true;  // several small tensors share one page
  std::uint32_t quantisations = 0;
  std::string archive_folder;     // for what libtorch reads from archives, until it is paged; empty: memory
  bool homes_in_files = true;     // tensors loaded from a file stay there until an operator writes them.
  bool saves_masters = true;      // state_dict() returns masters, not low-precision copies.
  bool keeps_hi_lo = false;       // a master is the visible bfloat16 and the 16 bits it lacks (rules/hi_lo.h).
  std::shared_ptr<void> reducer;  // of gradients; train/ defines its type.
  /// Brings parameters up to date after a step of stage 1 or 2 (tensor/refresh.h). Null: the first use waits for all.
  std::shared_ptr<Refresher> refresher;
  GeneralPath unpaged_operators;
  Tiling tiling = Tiling::automatic;
  std::size_t tile_above = 0;           // bytes.
  bool async_step = true;               // operators that an optimizer's step defers may run after it returned.
  bool updates_in_host = false;         // the host updates optimizer states whose home is not on the device.
  bool updates_where_all_fits = false;  // unless the device holds everything.
  /// Held while operators are deferred, and while deferred ones run.
  BookedMutex<std::recursive_mutex> deferral_mutex;
  std::vector<std::weak_ptr<Deferred>> deferred;  // in the order in which they were made.
  std::size_t deferred_alive = 0;                 // how many of them lived when last counted.
  std::vector<std::weak_ptr<Deferred>> opened;    // run in between other operators (advance_opened), oldest first.
  std::atomic<bool> has_opened = false;           // whether there are any: read without the mutex.
  std::atomic<std::size_t> arrivals = 0;          // of gradients, so far.
  std::size_t next_deferred = 0;                  // position of run_deferred() in it; 0: it does not run.
  EarlyUpdate early_update = EarlyUpdate::never;
  std::shared_ptr<UpdateBalance> update_balance;  // null: no parameter's last gradient came yet.
  // For tests, by ZEROPAGE_LEAVE_UPDATES=seed: backward leaves every third early update to forward. Lookups preview
  // rows whether it pays or not. Any deferred program may run in portions of a few windows, in between other
  // operators.
  bool leaves_updates = false;
  std::size_t last_arrivals = 0;  // of parameters' last gradients, if so.
  std::minstd_rand portions;      // of opened programs, if so.
  // Bytes of gradients that ranks sum at once; twice as many may be on their way. Tests have a small one, by
  // ZEROPAGE_BUCKET_BYTES, the same on all ranks.
  std::size_t bucket_bytes = 16 * kMiB;
  // Early updates of a parameter, those among them that the step requested, and the bytes that the others wrote.
  std::atomic<std::size_t> early_updates = 0, updates_committed = 0, wasted_bytes = 0;
  std::atomic<std::size_t> previews = 0;    // lookups that computed rows of a deferred update.
  std::atomic<std::size_t> not_finite = 0;  // values in gradients that updates have read.
  // Elements of parameters updated in the host and on the device. Counted with a device that has its own memory.
  std::atomic<std::size_t> updated_in_host = 0, updated_on_device = 0;
  std::mutex sharing_mutex;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> created;  // in no open scope; not yet equal on all ranks.
  std::map<std::uint64_t, c10::weak_intrusive_ptr<c10::StorageImpl>> stale;  // parameters, by number.
  std::atomic<std::uint64_t> creations = 0;
  ContractLog contract;  // of tensors that must stay the same on all ranks.
  Leaves leaves;         // that operators have met.
  /// Prepares a parameter at the end of the scope that made it. Null: the frontend does so itself, or need not.
  void (*begin_parameter)(const std::shared_ptr<Domain>& domain, at::Tensor& parameter) = nullptr;

  /// The file range of a tensor that a loader mapped from a file, if its home may stay there; else empty.
  SourceRange find_source(const at::TensorBase& tensor) const;
  /// Whether updates run in the host now.
  bool offloads_updates() const { return updates_in_host && !(updates_where_all_fits && cache->holds_everything()); }
  bool mixes() const { return compute_dtype != c10::ScalarType::Undefined; }
  /// Whether run_coming_updates() does anything.
  bool runs_coming_updates() const { return gathered && partition.ranks->gathers_apart(); }
  /// Ranks and mixed precision make us page every tensor: ranks must reduce its gradient, and its dtype must be that
  /// of the others. Small tensors stay in memory.
  bool pages(std::size_t bytes) const { return bytes > 0 && (partition.ranks || mixes() || bytes >= min_page_bytes); }
  /// Whether a tensor is too small to partition. Elements decide, so that tensors of one shape agree whatever their
  /// dtype.
  bool keeps_whole(std::size_t elements) const { return elements * 4 < min_page_bytes; }
  Layout layout_for(Role role, std::size_t elements) const {
    return partition.partitions[static_cast<int>(role)] && !keeps_whole(elements) ? Layout::partitioned
                                                                                  : Layout::replicated;
  }
  Stripes stripes(std::size_t elements) const {
    // A rank's part has whole blocks of moments that share a scale.
    const std::size_t unit = moments == Moments::blocks8 ? kernels::kQuantum : Stripes::kPartElements;
    return {elements, cache->page_bytes(), partition.ranks->size(), partition.ranks->rank(), unit};
  }
};

/// Ranges outside which a segment was zero when its content was `content`.
struct NonZero {
  struct Range {
    std::size_t begin, end;
  };
  std::vector<Range> ranges;  // in order, apart from each other.
  std::vector<Range> fresh;   // the parts to which nothing was added yet. Only these may hold -0.
  ContentMark content;
};

/// A parameter that keeps a paged leaf inside ([Note: inner tensors] in base/torch_compat.h). The program sees the
/// parameter's gradient, which keeps the leaf's inside. The leaf itself has none.
class Outer {
 public:
  virtual ~Outer() = default;
  /// The tensor inside the parameter's gradient; undefined: there is no gradient.
  virtual at::Tensor gradient() const = 0;
  /// Makes a gradient of the parameter that keeps `gradient` inside; undefined: the parameter then has none.
  virtual void set_gradient(const at::Tensor& gradient) const = 0;
};

class StorageSegment final : public Segment {
 public:
  StorageSegment(std::shared_ptr<Domain> domain, c10::StorageImpl* storage, Role role, std::size_t elements);
  ~StorageSegment() override;

  const std::shared_ptr<Domain>& domain() const { return domain_; }
  Role role() const { return role_; }

  /// The number of operator calls that wrote it, or may have.
  std::uint64_t writes() const { return writes_.load(std::memory_order_relaxed); }
  void note_write() { writes_.fetch_add(1, std::memory_order_relaxed); }

  // --- deferred operators ---

  /// Whether operators that read or write it have yet to run.
  bool is_deferred() const { return is_deferred_.load(std::memory_order_acquire); }
  bool will_change() const override { return is_deferred() && !domain_->runs_coming_updates(); }
  bool will_change_below() const override { return is_deferred_in_host_.load(std::memory_order_acquire); }
  /// Needs the domain's deferral_mutex.
  const std::shared_ptr<Deferred>& deferred() const { return deferred_; }
  /// `failure`: the error that ended the operators, for a checkpoint that waits for them.
  void defer(std::shared_ptr<Deferred> deferred, std::exception_ptr failure = nullptr);
  void run_deferred();
  /// Calls `awaiter` once, when the operators deferred now have run. False: nothing is deferred, and no call follows.
  bool await_deferred(std::shared_ptr<Awaiter> awaiter);
  /// How deferred operators access its content; `read` if there are none, or they have begun.
  Access deferred_access() const;
  /// Whether deferred operators write it.
  bool has_deferred_write() const;
  /// Bytes that run_deferred() pins at once, page by page, in this segment's cache.
  std::size_t deferred_bytes() const;
  /// Commits or discards an early update's shadow copy. Called before an operator takes or pins the segment.
  void settle();
  void set_written_ahead(std::shared_ptr<WrittenAhead> ahead);
  const std::shared_ptr<WrittenAhead>& written_ahead() const { return written_ahead_; }
  /// A parameter's state in rules/speculation.h. Needs the domain's deferral_mutex.
  std::shared_ptr<void> update_habit;
  /// True until find_home() gives it a home (Creation::unallocated).
  bool is_unallocated() const { return unallocated_.load(std::memory_order_acquire); }
  /// The most bytes of its present or future cache that one operator may hold.
  std::size_t frame_limit() const { return (is_unallocated() ? domain_->cache : cache())->frame_limit(); }
  /// `tier`: instead of the one that it was made for. Throws BudgetError, DiskError.
  void find_home(std::optional<Tier> tier = std::nullopt);
  /// The backward that last made a gradient of it to come (rules/rows_to_come.h).
  int latest_rows_to_come = -1;
  /// The low-precision encoding of its content, or null. A quantised segment has no home of its own.
  Quantisation* quantisation() const { return quantisation_.get(); }
  void set_quantisation(std::unique_ptr<Quantisation> quantisation) { quantisation_ = std::move(quantisation); }
  /// Whether these are scales of the codes in this rank's share, and not of a whole tensor's.
  bool is_of_share = false;

  // --- gradients ---

  /// Whether this rank accumulates the leaf's gradients for itself (train/local_sums.h). Threads of backward read it.
  std::atomic<bool> accumulates_here = false;
  /// The key of the first leaf of those that began to do so together; 0: never. The same on all ranks.
  std::atomic<std::uint64_t> accumulated_with = 0;
  /// Whether this is such a sum.
  bool is_local_sum = false;
  /// The norms that the program requests of this leaf's gradients.
  const std::shared_ptr<NormHabit>& norm_habit();
  /// The norm foreseen for this gradient; null: nothing is known.
  ForeseenNorm* foreseen_norm() const { return foreseen_norm_.get(); }
  void set_foreseen_norm(std::unique_ptr<ForeseenNorm> norm) { foreseen_norm_ = std::move(norm); }
  ContentMark content_mark() const;
  /// The ranges in which this gradient is not zero; null: nothing is known.
  const NonZero* nonzero() const {
    return nonzero_ && nonzero_->content == content_mark() ? nonzero_.get() : nullptr;
  }
  void set_nonzero(std::unique_ptr<const NonZero> nonzero) { nonzero_ = std::move(nonzero); }

  // --- mixed precision ---

  /// The master of this low-precision copy: a more precise tensor of the same shape, or, as int16, the bits that this
  /// one lacks (rules/hi_lo.h). Undefined: none.
  const at::Tensor& master() const { return master_; }
  void set_master(at::Tensor master) { master_ = std::move(master); }
  /// The storage of this master's low-precision copy; null if there is none, or it died.
  c10::intrusive_ptr<c10::StorageImpl> visible() const {
    return visible_ ? visible_->lock() : c10::intrusive_ptr<c10::StorageImpl>();
  }
  void set_visible(const StorageSegment& visible) { visible_.emplace(visible.storage()); }
  /// A tensor over all of the storage, which must be alive.
  at::Tensor whole_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, caffe2::TypeMeta dtype) const;

  // --- over ranks ---

  bool is_partitioned() const { return share_.defined(); }
  /// Whether all ranks have the same value (placement.h).
  Placement placement() const {
    if (is_own()) return Placement::own;
    return is_pending() && role_ != Role::parameter ? Placement::sum : Placement::same;
  }
  /// Tensors of this rank alone have no number: a share of another tensor, or content that waits for other ranks.
  bool is_own() const { return own_ || (number_ == 0 && domain_->partition.ranks); }
  /// Makes a tensor that is whole here this rank's own from now on.
  void become_own() { own_ = true; }
  /// Whether the program keeps it the same on all ranks, whatever it writes: a parameter, or an optimizer's state.
  bool keeps_same() const { return keeps_same_; }
  /// Also sets its master.
  void set_keeps_same(bool keeps);
  /// Whether the reducer made it, as a gradient.
  bool is_reduced() const { return is_reduced_; }
  void set_reduced() { is_reduced_ = true; }
  /// Whether anything but zeros was ever written to it.
  bool is_touched() const { return touched_; }
  /// A number for a tensor made like this one at a place that other ranks may not reach.
  std::uint64_t derived_number() const;
  bool is_stale() const { return stale_; }
  void set_stale(bool stale);
  /// Whether each rank can write its own share.
  bool is_shareable() const { return shareable_ && !own_; }
  const Stripes& stripes() const { return stripes_; }
  std::uint64_t number() const { return number_; }
  std::size_t elements() const { return elements_; }
  c10::weak_intrusive_ptr<c10::StorageImpl> storage() const;
  /// This rank's share of a partitioned tensor: flat, stripes().own() elements.
  const at::Tensor& share() const { return share_; }
  StorageSegment& share_segment() const;
  /// The segment whose bytes are at home on this rank: that of its share, if it is partitioned, else this one.
  const StorageSegment& at_home() const { return is_partitioned() ? share_segment() : *this; }
  StorageSegment& at_home() { return is_partitioned() ? share_segment() : *this; }
  /// Runs deferred operators and waits for pending content.
  void complete();
  /// Waits for pending content.
  void complete_pending();
  /// Prepares for operators that use the whole tensor: completes it and makes all shares current.
  void refresh(Access access);
  /// Makes the content zeros. It moves no bytes unless tensors share its pages.
  void zero();
  /// Prepares for operators that use this rank's share alone.
  void open_share(Access access);
  /// Does the same for the reducer, which itself brings the pending content.
  void claim_share(Access access);
  /// Whether the domain knows the leaf over this storage.
  bool leaf_known = false;
  /// The parameter of a subclass, such as DTensor, that keeps this leaf inside; null: none.
  const std::shared_ptr<const Outer>& outer() const { return outer_; }
  void set_outer(std::shared_ptr<const Outer> outer) { outer_ = std::move(outer); }
  /// From now on its content is pending, in place of what was; null: it is there. Any thread may ask and tell.
  void will_come(std::shared_ptr<Pending> pending) noexcept;
  /// Ends that state if it is of `pending`.
  void has_come(const Pending& pending) noexcept;
  Layout layout() const;
  bool is_pending() const { return is_pending_.load(std::memory_order_acquire); }
  /// Null: none.
  std::shared_ptr<Pending> pending() const noexcept;
  bool comes_in_parts() const {
    const auto coming = pending();
    return coming && coming->comes_in_parts();
  }

  /// The start of the segment's own range in an address space without memory. Code that recognises shared tensors by
  /// their addresses uses it.
  std::uint64_t virtual_address() const { return virtual_address_; }
  static void destroy(void* segment);  // the DataPtr's deleter

 protected:
  void expose(std::byte* data) override;
  void hide() override;

 private:
  friend struct SegmentBuilder;
  friend void take_segment(const at::Tensor& tensor, const at::Tensor& made);
  void point_to(void* data);
  void gather_stale();
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
  std::shared_ptr<const Outer> outer_;
  bool shareable_ = false;
  std::atomic<bool> stale_ = false;
  bool own_ = false, keeps_same_ = false, is_reduced_ = false, touched_ = false;
  mutable std::atomic<std::uint64_t> derived_ = 0;
  std::atomic<bool> is_pending_ = false;
  std::shared_ptr<Pending> pending_;  // under pending_mutex
  std::atomic<bool> is_deferred_ = false, is_deferred_in_host_ = false;
  std::shared_ptr<Deferred> deferred_;
  std::shared_ptr<Awaiter> awaiter_;
  std::atomic<bool> is_written_ahead_ = false;
  std::shared_ptr<WrittenAhead> written_ahead_;
  std::unique_ptr<const SegmentBuilder> builder_;  // if it has, or had, no home; other threads may read it meanwhile
  std::atomic<bool> unallocated_ = false;
  std::unique_ptr<Quantisation> quantisation_;
  std::shared_ptr<NormHabit> norm_habit_;
  std::unique_ptr<ForeseenNorm> foreseen_norm_;
  std::unique_ptr<const NonZero> nonzero_;
  std::atomic<std::uint64_t> writes_ = 0;
};

/// The segment behind `tensor`, or null if it is not paged. Takes no lock and looks nothing up.
inline StorageSegment* segment_of(c10::StorageImpl& storage) {
  const auto& data = storage._mutable_data_ptr_no_checks();
  return data.get_deleter() == &StorageSegment::destroy ? static_cast<StorageSegment*>(data.get_context()) : nullptr;
}
inline StorageSegment* segment_of(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kPagedKey) || !tensor.has_storage()) return nullptr;
  return segment_of(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

/// True if `tensor` covers all of its storage, each element once: its bytes in memory order are the segment's.
bool is_whole(const at::TensorBase& tensor);

/// How a tensor is created over ranks.
struct Creation {
  std::optional<Layout> layout = std::nullopt;  // nullopt: the role's
  /// Its number on all ranks, for tensors that ranks may make in another order, such as gradients. 0: counted.
  std::uint64_t number = 0;
  /// Its model. Outside of steps and scopes its number derives from the model's number: there ranks may make
  /// different tensors, for example in a layer that only some of them run.
  const StorageSegment* like = nullptr;
  Placement placement = Placement::same;
  /// Has no home until find_home(): a temporary, which may die before an operator needs its content.
  bool unallocated = false;
  /// Shares no page with other tensors, however small.
  bool alone = false;
  /// Belongs to this rank alone: other ranks know nothing of it.
  bool is_local = false;
  /// The file range of its content, if its tier is the disk (Domain::find_source).
  SourceRange source = {};
  /// The caller overwrites it before anything reads it.
  bool is_unset = false;
  /// The tier of a local tensor's home; nullopt: the role's.
  std::optional<Tier> tier = std::nullopt;
};

/// Makes a paged tensor that reads as zeros, unless it is_unset, and does not require a gradient. Strides must be
/// dense.
at::Tensor make_paged(const std::shared_ptr<Domain>& domain, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      caffe2::TypeMeta dtype, Role role, const Creation& creation = {});

/// Makes a whole gradient that belongs to this rank alone. Its home is the disk if that of gradients has no room.
/// Throws BudgetError if neither has; its message is for the caller to complete. `unallocated`: it has no home until
/// find_home().
at::Tensor make_own_gradient(const std::shared_ptr<Domain>& domain, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                             caffe2::TypeMeta dtype, bool is_unset, bool unallocated = false);

/// Writes this rank's share of a partitioned tensor, from memory that holds the whole on the domain's device.
void fill_share(const at::Tensor& tensor, const void* whole);

/// Moves the segment of `made` into the storage of `tensor`: its content becomes that of all views of `tensor`, on
/// whichever tier it is. Both are paged and have equally many bytes; nothing else may use `made`. Throws AccessError
/// if `tensor` is pinned.
void take_segment(const at::Tensor& tensor, const at::Tensor& made);

/// Runs all deferred operators, in the order in which they were begun. Throws the first error.
void run_deferred(Domain& domain);
/// Over ranks: runs the updates of the parameters that are used next, so that their gathers go on under the operators
/// before. All ranks call it at the same places, where an operator is about to pin `requests`. Throws the
/// updates' errors.
void run_coming_updates(c10::ArrayRef<PinRequest> requests);
/// Runs what opened operators can do without waiting. Returns at once if another thread uses deferred operators.
/// `may_begin`: the operator that comes cannot join a program, so those that wait to begin may do so.
void advance_opened(Domain& domain, bool may_begin);
/// Makes tensors created in a scope the same on all ranks. Each rank keeps the share it initialised; tensors that are
/// not partitioned come from rank 0. Throws RankError.
void start_equal(Domain& domain);

/// Pages an existing tensor in place and moves its content home. True: it is paged now. False: it stays as it is,
/// because it is too small, on another device, not strided, a subclass, or shares its storage with unknown tensors.
bool adopt(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, Role role);
/// Whether torch's own allocator made the tensor's memory. Memory that from_numpy() shares belongs to its array.
bool has_memory_of_torch(const at::Tensor& tensor);
/// Does the same for two tensors that share one storage, if nothing else does: they still share it afterwards.
bool adopt_both(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, const at::Tensor& twin, Role role);
/// Does the same, and gives a tensor that shares its storage a storage of its own, as Module::to does. Moves a tensor
/// on another device to the domain's. `number`: its number on all ranks; 0: counted.
bool page_tensor(const std::shared_ptr<Domain>& domain, at::Tensor& tensor, Role role, std::uint64_t number = 0);

/// Holds the segments of a set of tensors in memory, exposed, while it lives.
class TensorPin {
 public:
  TensorPin() = default;
  /// See PinOptions in pager/cache/whole_pins.h.
  explicit TensorPin(c10::ArrayRef<PinRequest> requests, const PinOptions& options = {});
  TensorPin(TensorPin&& other) noexcept
      : requests_(std::move(other.requests_)),
        options_(other.options_),
        storages_(std::move(other.storages_)),
        thread_(other.thread_),
        exceptions_(other.exceptions_) {
    other.requests_.clear();
  }
  TensorPin& operator=(TensorPin&& other) noexcept {
    std::swap(requests_, other.requests_);
    std::swap(options_, other.options_);
    std::swap(storages_, other.storages_);
    std::swap(thread_, other.thread_);
    std::swap(exceptions_, other.exceptions_);
    return *this;
  }
  /// If an exception ends the pin, tensors that were to be overwritten keep their earlier content.
  ~TensorPin() {
    if (!requests_.empty()) let_go(exceptions_ && std::uncaught_exceptions() > *exceptions_);
  }
  /// Unpins after an operator that succeeded, and stores changes to gathered tensors in this rank's share.
  void release();

 private:
  void let_go(bool failed);
  PinOptions options_of(std::size_t begin) const { return {options_.lasting, begin == 0 ? options_.extra : 0}; }
  c10::SmallVector<PinRequest, 8> requests_;     // grouped by cache.
  PinOptions options_;                           // `extra` counts in the first cache.
  c10::SmallVector<c10::Storage, 8> storages_;   // kept alive: `tensor.data = other` may drop them meanwhile.
  std::uint64_t thread_ = this_thread_number();  // that took the pins.
  std::optional<int> exceptions_;                // uncaught when pinned; nullopt if all requests read.
};

}  // namespace zeropage
