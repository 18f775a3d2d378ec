#include "zeropage/tensor/paged_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/VariableHooksInterface.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>

#include "zeropage/base/errors.h"
#include "zeropage/base/torch_compat.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

constexpr const char* kRawAccess =
    "this tensor is paged by zeropage: its data may be on disk and has no address. Use it through PyTorch operators, "
    "or "
    "read and write it raw inside `with zeropage.pinned(tensor) as t:`";

std::size_t row_bytes(c10::IntArrayRef sizes, std::size_t item_bytes) {
  std::size_t elements = 1;
  for (std::size_t i = 1; i < sizes.size(); ++i) elements *= sizes[i];
  return sizes.empty() ? 0 : elements * item_bytes;
}

Tier tier_for(const Domain& domain, Role role, std::size_t bytes) {
  switch (domain.tiers[static_cast<int>(role)]) {
    case TierChoice::device:
      return Tier::device;
    case TierChoice::host:
      return Tier::host;
    case TierChoice::disk:
      return Tier::disk;
    case TierChoice::automatic:
    case TierChoice::automatic_below:
      break;
  }
  const bool below = domain.tiers[static_cast<int>(role)] == TierChoice::automatic_below;
  if (!below && domain.cache->has_separate_memory() && domain.cache->has_room(Tier::device, bytes))
    return Tier::device;
  const bool to_disk = !domain.cache->has_room(Tier::host, bytes) && domain.cache->has_room(Tier::disk, bytes);
  return to_disk ? Tier::disk : Tier::host;
}

/// Replaces the storage's data by the segment.
void attach(std::unique_ptr<StorageSegment> segment, c10::StorageImpl& storage) {
  const auto device = segment->domain()->device;
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, segment.release(), &StorageSegment::destroy, device));
  compat::install_guard(storage, kRawAccess);
}

}  // namespace

/// By page: the place of this rank's part in a file with the whole tensor. A last part that is not all within the
/// tensor is not in the file.
static std::vector<std::uint64_t> parts_in_file(const Stripes& stripes, std::size_t item_bytes) {
  std::vector<std::uint64_t> places;
  for (std::size_t page = 0; page < stripes.pages(); ++page) {
    const std::size_t begin = stripes.page_begin(page) + stripes.rank() * stripes.part(page);
    const bool is_whole = begin + stripes.part(page) <= stripes.elements();
    places.push_back(is_whole ? begin * item_bytes : SegmentSpec::kNotInFile);
  }
  return places;
}

/// Makes a segment and binds it to its home.
struct SegmentBuilder {
  Domain* domain;
  std::size_t bytes;
  std::size_t row_bytes;
  caffe2::TypeMeta dtype;
  Role role;
  Creation creation;

  std::unique_ptr<StorageSegment> operator()(const std::shared_ptr<Domain>& owner, c10::StorageImpl& storage) const {
    const std::size_t elements = bytes / dtype.itemsize();
    auto segment = std::make_unique<StorageSegment>(owner, &storage, role, elements);
    if (is_over_ranks()) {
      segment->own_ = creation.placement == Placement::own;
      segment->number_ = creation.number ? creation.number
                         : is_apart()    ? creation.like->derived_number()
                                         : ++domain->creations;
      segment->stripes_ = domain->stripes(elements);
      segment->shareable_ = !domain->keeps_whole(elements);
      note_created(*domain, segment->storage());
    }
    if (creation.unallocated) {
      segment->builder_ = std::make_unique<const SegmentBuilder>(*this);
      segment->unallocated_ = true;
    } else {
      bind(*segment);
    }
    return segment;
  }

  void bind(StorageSegment& segment) const {
    if (!is_over_ranks()) {
      const bool resident = bytes < domain->min_page_bytes && !creation.alone;
      const Tier tier = resident ? memory_tier() : creation.tier.value_or(tier_for(*domain, role, bytes));
      const SourceRange source = tier == Tier::disk ? creation.source : SourceRange{};
      domain->cache->bind(segment, {bytes, row_bytes, role, tier, /*page_bytes=*/0, is_alone() || source,
                                    /*is_staging=*/false, source, creation.is_unset});
    } else {
      segment.layout_of(*this) == Layout::partitioned ? bind_partitioned(segment) : bind_replicated(segment);
    }
  }

 private:
  bool is_over_ranks() const { return domain->partition.ranks && !creation.is_local; }
  bool is_alone() const { return creation.alone || !domain->shares_pages; }
  /// Whether other ranks may make other tensors meanwhile.
  bool is_apart() const { return creation.like && !makes_what_all_ranks_make(); }
  std::size_t page_bytes(const Stripes& stripes) const { return stripes.full_page() * dtype.itemsize(); }

  Tier memory_tier() const { return domain->cache->has_separate_memory() ? Tier::device : Tier::host; }

  void bind_replicated(StorageSegment& segment) const {
    if (!segment.shareable_) {
      domain->cache->bind(segment, {bytes, 0, role, memory_tier()});
      return;
    }
    // Padding fills every rank's last part, so that ranks gather shares in place.
    const std::size_t padded = segment.stripes_.padded() * dtype.itemsize();
    domain->cache->bind(segment,
                        {padded, 0, role, tier_for(*domain, role, padded), page_bytes(segment.stripes_), is_alone()});
  }

  void bind_partitioned(StorageSegment& segment) const {
    const Stripes& stripes = segment.stripes_;
    const std::size_t item_bytes = dtype.itemsize();
    const std::size_t own = stripes.own(), share_bytes = stripes.share() * item_bytes;
    auto own_storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), own * item_bytes,
                                                             c10::DataPtr(nullptr, domain->device), nullptr, false);
    auto share = std::make_unique<StorageSegment>(segment.domain_, own_storage.get(), role, own);
    const std::size_t part_bytes = page_bytes(stripes) / stripes.ranks();
    const Tier tier = tier_for(*domain, role, share_bytes);
    const SourceRange source = tier == Tier::disk ? creation.source : SourceRange{};
    // In a file only the elements of a part are consecutive.
    const std::size_t page =
        source ? part_bytes : std::max(round_down(domain->cache->page_bytes(), part_bytes), part_bytes);
    SegmentSpec spec{share_bytes, 0, role, tier, page, is_alone() || source};
    if (source) {
      spec.source = source;
      spec.source_pages = parts_in_file(stripes, item_bytes);
    }
    domain->cache->bind(*share, spec);
    segment.share_ = wrap(std::move(share), std::move(own_storage), own);
    // A tensor that other ranks create at another time, or whose home is found later, shares no page.
    const bool alone =
        creation.number != 0 || creation.unallocated || is_apart() || (creation.alone && role == Role::activation);
    domain->gathered->bind_gathered(segment, {bytes, stripes.padded() * item_bytes, page_bytes(stripes), role,
                                              &segment.share_segment(), segment.number_, alone});
  }

  at::Tensor wrap(std::unique_ptr<StorageSegment> segment, c10::intrusive_ptr<c10::StorageImpl> own,
                  std::size_t n) const;
};

namespace {

at::Tensor tensor_over(const Domain& domain, c10::intrusive_ptr<c10::StorageImpl> storage, c10::IntArrayRef sizes,
                       c10::IntArrayRef strides, caffe2::TypeMeta dtype) {
  const auto backend = c10::computeDispatchKey(std::nullopt, std::nullopt, domain.device);
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(backend), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  compat::add_keys(*tensor.unsafeGetTensorImpl());
  return tensor;
}

/// Copies the `bytes` at `data` to the beginning of `segment`.
void copy_in(StorageSegment& segment, const std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0, at = 0; at < bytes; ++i, at += segment.page_bytes()) {
    PagePin page = segment.cache()->pin_page(segment, i, Access::overwrite);
    page.wait();
    page.fill(data + at, std::min(segment.bytes_of(i), bytes - at));
  }
}

/// Copies this rank's share of the `bytes` at `data`. `is_in_file`: except parts that the file has.
void copy_share_in(StorageSegment& segment, const std::byte* data, std::size_t item_bytes, bool is_in_file) {
  StorageSegment& share = segment.share_segment();
  const Stripes& stripes = segment.stripes();
  const bool has_last = stripes.own() == stripes.share();  // all of the last part is within the tensor
  for (std::size_t i = 0, end = 0; i < stripes.own(); i = end) {
    end = std::min(stripes.part_end(i), stripes.own());
    if (is_in_file && (has_last || stripes.part_end(i) < stripes.share())) continue;
    const std::size_t page = i * item_bytes / share.page_bytes();
    PagePin part = share.cache()->pin_page(share, page, Access::write);
    part.wait();
    part.fill(data + stripes.in_tensor(i) * item_bytes, (end - i) * item_bytes,
              i * item_bytes - page * share.page_bytes());
  }
}

}  // namespace

at::Tensor SegmentBuilder::wrap(std::unique_ptr<StorageSegment> segment, c10::intrusive_ptr<c10::StorageImpl> own,
                                std::size_t n) const {
  attach(std::move(segment), *own);
  const auto elements = static_cast<std::int64_t>(n);
  return tensor_over(*domain, std::move(own), elements, 1, dtype);
}

StorageSegment::StorageSegment(std::shared_ptr<Domain> domain, c10::StorageImpl* storage, Role role,
                               std::size_t elements)
    : domain_(std::move(domain)), storage_(storage), role_(role), elements_(elements) {
  static std::atomic<std::uint64_t> next{std::uint64_t{1} << 56};  // above the addresses of processes
  virtual_address_ = next.fetch_add(round_up(storage->nbytes() + 1, 64));
}

StorageSegment::~StorageSegment() {
  if (cache()) cache()->release(*this);
}

c10::weak_intrusive_ptr<c10::StorageImpl> StorageSegment::storage() const {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(storage_));
}

at::Tensor StorageSegment::whole_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                                        caffe2::TypeMeta dtype) const {
  return tensor_over(*domain_, storage().lock(), sizes, strides, dtype);
}

std::uint64_t StorageSegment::derived_number() const {
  std::uint64_t hash = number_ * 0x9e3779b97f4a7c15 + ++derived_;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  return (hash ^ (hash >> 31)) | (std::uint64_t{1} << 62);  // never a counted number
}

StorageSegment& StorageSegment::share_segment() const { return *segment_of(share_); }

void StorageSegment::point_to(void* data) { compat::set_data(*storage_, data); }

void StorageSegment::expose(std::byte* data) {
  point_to(data);
  compat::set_guard(*storage_, /*closed=*/false);
}

void StorageSegment::hide() {
  point_to(nullptr);
  compat::set_guard(*storage_, /*closed=*/true);
}

void StorageSegment::destroy(void* context) {
  std::unique_ptr<StorageSegment> segment(static_cast<StorageSegment*>(context));
  segment->outer_ = nullptr;  // of Python, whose lock must not be taken under those below
  if (!segment->is_deferred() && !segment->is_written_ahead_) return;
  const auto domain = segment->domain_;
  std::lock_guard lock(domain->deferral_mutex);
  segment->storage_ = nullptr;
  try {
    if (const auto ahead = segment->written_ahead_) ahead->discard();
  } catch (const std::exception&) {
    // The next operator that needs the rest meets the error again.
  }
  if (const auto deferred = segment->deferred_) deferred->keep_alive(segment);
}

void StorageSegment::find_home(std::optional<Tier> tier) {
  if (!is_unallocated()) return;
  SegmentBuilder builder = *builder_;
  if (tier) builder.creation.tier = tier;
  builder.bind(*this);
  unallocated_.store(false, std::memory_order_release);
}

Layout StorageSegment::layout_of(const SegmentBuilder& builder) const {
  if (own_) return Layout::replicated;
  return builder.creation.layout.value_or(domain_->layout_for(role_, elements_));
}

Layout StorageSegment::layout() const {
  if (is_unallocated()) return builder_->creation.is_local ? Layout::replicated : layout_of(*builder_);
  return is_partitioned() ? Layout::partitioned : Layout::replicated;
}

void StorageSegment::defer(std::shared_ptr<Deferred> deferred, std::exception_ptr failure) {
  deferred_ = std::move(deferred);
  // Call it before other threads may write the segment: they see that it is deferred, and wait for the mutex.
  if (!deferred_ && awaiter_) {
    std::exchange(awaiter_, nullptr)->has_run(*this, std::move(failure));
  }
  if (deferred_ && share_.defined() && domain_->runs_coming_updates()) {
    try {
      cache()->expect_change(*this);
    } catch (const std::exception&) {  // of a gather under way: the operator meets it when it runs
    }
  }
  const bool is_deferred = deferred_ != nullptr, in_host = deferred_ && deferred_->runs_in_host();
  is_deferred_in_host_.store(in_host, std::memory_order_release);
  if (share_.defined()) share_segment().is_deferred_in_host_.store(in_host, std::memory_order_release);
  is_deferred_.store(is_deferred, std::memory_order_release);  // last: another thread may then delete the segment
}

bool StorageSegment::await_deferred(std::shared_ptr<Awaiter> awaiter) {
  std::lock_guard lock(domain_->deferral_mutex);
  if (!deferred_) return false;
  deferred_->seal();
  awaiter_ = std::move(awaiter);
  return true;
}

void StorageSegment::set_written_ahead(std::shared_ptr<WrittenAhead> ahead) {
  written_ahead_ = std::move(ahead);
  is_written_ahead_.store(written_ahead_ != nullptr, std::memory_order_release);
}

void StorageSegment::settle() {
  if (!is_written_ahead_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(domain_->deferral_mutex);
  if (const auto deferred = deferred_) deferred->settle();
  if (const auto ahead = written_ahead_) ahead->discard();
}

void run_deferred(Domain& domain) {
  std::lock_guard lock(domain.deferral_mutex);
  const auto all = domain.deferred;
  std::exception_ptr error;
  for (const auto& weak : all) {
    ++domain.next_deferred;
    try {
      if (const auto deferred = weak.lock(); deferred && !deferred->can_wait()) deferred->run();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  domain.next_deferred = 0;
  std::erase_if(domain.deferred, [](const auto& weak) { return weak.expired(); });
  if (error) std::rethrow_exception(error);
}

/// For tests: one of four calls opens a program, if there is any.
static void open_one_at_random(Domain& domain) {
  if (domain.deferred.empty() || domain.portions() % 4 > 0) return;
  const auto deferred = domain.deferred[domain.portions() % domain.deferred.size()].lock();
  try {
    if (deferred) deferred->open();
  } catch (const std::exception&) {
    // The operator that needs its tensors meets the error again.
  }
}

void advance_opened(Domain& domain, bool may_begin) {
  if (!domain.has_opened.load(std::memory_order_acquire) && !domain.leaves_updates) return;
  const std::unique_lock lock(domain.deferral_mutex, std::try_to_lock);
  if (!lock) return;
  if (domain.leaves_updates) open_one_at_random(domain);
  const auto is_done = [](const std::weak_ptr<Deferred>& weak) {
    const auto deferred = weak.lock();
    return !deferred || deferred->length() == 0;
  };
  std::erase_if(domain.opened, is_done);
  const auto opened = domain.opened;  // an operator may open another
  for (const auto& weak : opened) {
    const auto deferred = weak.lock();
    try {
      if (deferred && !deferred->advance(may_begin)) return;  // updates are needed in this order
    } catch (const std::exception&) {
      if (deferred->length() == 0) throw;  // the rest of the program is given up: the caller must know
      return;                              // the operator that needs the tensor goes on there, and may meet it again
    }
  }
  std::erase_if(domain.opened, is_done);
  domain.has_opened.store(!domain.opened.empty(), std::memory_order_release);
}

bool StorageSegment::has_deferred_write() const {
  std::lock_guard lock(domain_->deferral_mutex);
  return deferred_ && deferred_->writes(*this);
}

Access StorageSegment::deferred_access() const {
  std::lock_guard lock(domain_->deferral_mutex);
  return deferred_ ? deferred_->access_to(*this) : Access::read;
}

void StorageSegment::run_deferred() {
  if (!is_deferred()) return;
  std::lock_guard lock(domain_->deferral_mutex);
  if (const auto deferred = deferred_) deferred->run();
}

std::size_t StorageSegment::deferred_bytes() const {
  std::lock_guard lock(domain_->deferral_mutex);
  std::size_t bytes = 0;
  if (!deferred_) return bytes;
  deferred_->for_each_segment([&](const StorageSegment& operand) {
    if (&operand == this || operand.is_unallocated() || operand.cache() != cache()) return;
    bytes += std::min(operand.bytes(), 2 * operand.page_bytes());
  });
  return bytes;
}

const std::shared_ptr<NormHabit>& StorageSegment::norm_habit() {
  std::lock_guard lock(domain_->sharing_mutex);
  if (!norm_habit_) norm_habit_ = std::make_shared<NormHabit>();
  return norm_habit_;
}

ContentMark StorageSegment::content_mark() const {
  std::lock_guard lock(domain_->deferral_mutex);
  return {is_unallocated() ? 0 : cache()->changes(*this), deferred_ ? deferred_->length() : 0};
}

bool is_whole(const at::TensorBase& tensor) {
  return tensor.storage_offset() == 0 &&
         tensor.numel() * tensor.itemsize() == tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() &&
         tensor.is_non_overlapping_and_dense();
}

at::Tensor make_paged(const std::shared_ptr<Domain>& domain, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      caffe2::TypeMeta dtype, Role role, const Creation& creation) {
  const std::size_t bytes = c10::multiply_integers(sizes) * dtype.itemsize();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       c10::DataPtr(nullptr, domain->device), nullptr,
                                                       /*resizable=*/false);
  const SegmentBuilder builder{domain.get(), bytes, row_bytes(sizes, dtype.itemsize()), dtype, role, creation};
  attach(builder(domain, *storage), *storage);
  return tensor_over(*domain, std::move(storage), sizes, strides, dtype);
}

at::Tensor make_own_gradient(const std::shared_ptr<Domain>& domain, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                             caffe2::TypeMeta dtype, bool is_unset, bool unallocated) {
  Creation creation{.unallocated = unallocated, .is_local = true, .is_unset = is_unset};
  try {
    return make_paged(domain, sizes, strides, dtype, Role::gradient, creation);
  } catch (const BudgetError&) {
    if (!domain->cache->has_room(Tier::disk, c10::multiply_integers(sizes) * dtype.itemsize())) throw;
  }
  creation.tier = Tier::disk;
  return make_paged(domain, sizes, strides, dtype, Role::gradient, creation);
}

SourceRange Domain::find_source(const at::TensorBase& tensor) const {
  if (!homes_in_files || partition.replicas || !tensor.is_cpu() || !tensor.is_non_overlapping_and_dense()) return {};
  if (tensor.is_conj() || tensor.is_neg() || tensor.nbytes() < std::max<std::size_t>(min_page_bytes, 1)) return {};
  return cache->find_source(tensor.const_data_ptr(), tensor.nbytes());
}

void fill_share(const at::Tensor& tensor, const void* whole) {
  StorageSegment& segment = *segment_of(tensor);
  segment.open_share(Access::overwrite);
  copy_share_in(segment, static_cast<const std::byte*>(whole), tensor.itemsize(), /*is_in_file=*/false);
}

void take_segment(const at::Tensor& tensor, const at::Tensor& made) {
  auto& storage = *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  StorageSegment& old = *segment_of(storage);
  if (old.role() == Role::parameter) old.complete_pending();  // the thread that refreshes it needs it
  if (old.is_pinned()) {
    throw AccessError(
        "a paged tensor is written here while zeropage.pinned() or another thread holds it; let go of it");
  }
  auto& other = *made.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  StorageSegment& segment = *segment_of(other);
  const bool is_stale = segment.is_stale();
  segment.set_stale(false);  // domains list stale tensors by storage
  (void)other._mutable_data_ptr_no_checks().release_context();
  segment.storage_ = &storage;
  segment.set_stale(is_stale);
  segment.virtual_address_ = old.virtual_address_;
  segment.writes_ = old.writes_.load();
  attach(std::unique_ptr<StorageSegment>(&segment), storage);  // the old one dies
}

namespace {

bool adopt(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, Role role, std::uint64_t number,
           std::size_t owners = 1) {
  if (segment_of(tensor)) return true;
  if (!tensor.defined() || tensor.layout() != c10::kStrided || tensor.device() != domain->device ||
      !tensor.has_storage() || tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_quantized() ||
      tensor.is_conj() || tensor.is_neg()) {
    return false;
  }
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (!domain->pages(storage.nbytes()) || !is_whole(tensor) || storage.use_count() != owners) return false;
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  const auto* data = static_cast<const std::byte*>(impl.data());
  const SegmentBuilder builder{domain.get(),
                               storage.nbytes(),
                               row_bytes(tensor.sizes(), tensor.itemsize()),
                               tensor.dtype(),
                               role,
                               {.number = number, .source = domain->find_source(tensor)}};
  auto segment = builder(domain, impl);
  const bool is_in_file = builder.creation.source && segment->at_home().tier() == Tier::disk;
  if (segment->is_partitioned()) {
    segment->open_share(Access::overwrite);
    copy_share_in(*segment, data, tensor.itemsize(), is_in_file);
  } else if (!is_in_file || domain->partition.ranks) {
    copy_in(*segment, data, storage.nbytes());
  }
  impl.set_resizable(false);
  attach(std::move(segment), impl);
  compat::add_keys(*tensor.unsafeGetTensorImpl());
  return true;
}

}  // namespace

bool adopt(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, Role role) {
  return adopt(domain, tensor, role, /*number=*/0);
}

bool has_memory_of_torch(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  const auto& data =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  const auto made_by_torch = c10::GetAllocator(tensor.device().type())->raw_deleter();
  if (!made_by_torch || data.get_deleter() == made_by_torch) return true;
  // Made before zeropage's own allocator came (space/cpu_allocator.h).
  return tensor.is_cpu() && data.get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter();
}

bool adopt_both(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, const at::Tensor& twin, Role role) {
  c10::NoGradGuard no_grad;
  auto* const other = twin.unsafeGetTensorImpl();
  if (other == tensor.unsafeGetTensorImpl() || !twin.has_storage() || !twin.storage().is_alias_of(tensor.storage()) ||
      twin.key_set().has(c10::DispatchKey::Python) || !adopt(domain, tensor, role, /*number=*/0, /*owners=*/2)) {
    return false;
  }
  compat::add_keys(*other);
  return true;
}

bool page_tensor(const std::shared_ptr<Domain>& domain, at::Tensor& tensor, Role role, std::uint64_t number) {
  c10::NoGradGuard no_grad;
  if (adopt(domain, tensor, role, number)) return true;
  if (!tensor.defined() || tensor.layout() != c10::kStrided || !tensor.is_leaf() ||
      tensor.key_set().has(c10::DispatchKey::Python) || (tensor.is_meta() && !domain->planned_on)) {
    return false;
  }
  if (!domain->pages(tensor.nbytes())) {
    if (tensor.device() != domain->device) compat::become(tensor, tensor.to(domain->device));
    return false;
  }
  const at::Tensor like = at::empty_like(tensor, tensor.options().device(c10::kMeta));
  const bool may_stay = !domain->partition.ranks || tensor.device() == domain->device;  // its last part is copied
  const Creation creation{.number = number, .source = may_stay ? domain->find_source(tensor) : SourceRange{}};
  at::Tensor own = make_paged(domain, like.sizes(), like.strides(), tensor.dtype(), role, creation);
  StorageSegment& made = *segment_of(own);
  if (creation.source && made.at_home().tier() == Tier::disk && !domain->partition.ranks) {
    compat::become(tensor, own);  // the file holds the content
  } else if (creation.source && made.at_home().tier() == Tier::disk && made.is_partitioned()) {
    made.open_share(Access::overwrite);
    copy_share_in(made, static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.itemsize(), true);
    compat::become(tensor, own);
  } else {
    const SameValues same;  // `own` is no result of this rank's data: all ranks will have it
    compat::become(tensor, own.copy_(tensor));
  }
  return true;
}

TensorPin::TensorPin(c10::ArrayRef<PinRequest> asked, const PinOptions& options) : options_(options) {
  // Deferred operators run in the frame that the tensor's next operator will use, and may overwrite all of it.
  c10::SmallVector<PinRequest, 8> requests(asked.begin(), asked.end());
  c10::SmallVector<PinRequest*, 4> deferred;
  // No other thread runs them meanwhile: deferred_access() holds.
  std::unique_lock<BookedMutex<std::recursive_mutex>> deferral;
  for (PinRequest& request : requests) {
    auto* segment = static_cast<StorageSegment*>(request.segment);
    if (request.access != Access::read && !exceptions_) exceptions_ = std::uncaught_exceptions();
    storages_.emplace_back(segment->storage().lock());
    segment->settle();
    if (segment->quantisation()) {
      throw AccessError(
          "what an optimizer keeps in fewer bits (optimizer_dtype) has no float32 memory to hold; use a copy of it: "
          "tensor.clone()");
    }
    const bool in_frame = segment->is_deferred() && !segment->will_change_below() && !segment->is_unallocated() &&
                          request.access != Access::overwrite;
    auto& mutex = segment->domain()->deferral_mutex;
    const bool other_space = deferral.mutex() && deferral.mutex() != &mutex;
    if (!in_frame || other_space || segment->domain()->partition.ranks) {
      segment->refresh(request.access);
      continue;
    }
    if (!deferral.mutex()) deferral = std::unique_lock(mutex);
    deferred.push_back(&request);
  }
  c10::SmallVector<Segment*, 4> written;  // by the caller, after the deferred operators
  for (PinRequest* request : deferred) {
    const auto* segment = static_cast<StorageSegment*>(request->segment);
    options_.extra += segment->deferred_bytes();
    if (request->access == Access::write) written.push_back(request->segment);
    if (segment->deferred_access() != Access::overwrite) continue;
    request->access = Access::overwrite;
    if (!exceptions_) exceptions_ = std::uncaught_exceptions();
  }
  run_coming_updates(requests);
  // One call for each cache. Nearly always there is one.
  for (std::size_t begin = 0; begin < requests.size();) {
    FrameCache& cache = *requests[begin].segment->cache();
    std::size_t end = begin + 1;
    while (end < requests.size() && requests[end].segment->cache().get() == &cache) ++end;
    try {
      while (true) {
        try {
          const std::size_t granted = cache.pin({requests.data() + begin, end - begin}, options_of(begin));
          if (begin == 0) options_.extra = granted;
          break;
        } catch (const VersionOpen&) {  // opened since settle() above
          for (std::size_t i = begin; i < end; ++i) static_cast<StorageSegment*>(requests[i].segment)->settle();
        }
      }
    } catch (...) {
      TensorPin held = std::move(*this);
      throw;
    }
    requests_.append(requests.begin() + begin, requests.begin() + end);
    begin = end;
  }
  try {
    for (const PinRequest* request : deferred) static_cast<StorageSegment*>(request->segment)->run_deferred();
    for (Segment* segment : written) segment->cache()->write_again(*segment);
  } catch (...) {
    TensorPin held = std::move(*this);
    throw;
  }
}

void TensorPin::release() {
  c10::SmallVector<Segment*, 8> written;
  for (const PinRequest& request : requests_) {
    if (request.access != Access::read && request.segment->cache()->is_gathered()) written.push_back(request.segment);
  }
  let_go(/*failed=*/false);
  for (Segment* segment : written) segment->cache()->store(*segment);
  storages_.clear();
}

void TensorPin::let_go(bool failed) {
  for (std::size_t begin = 0; begin < requests_.size();) {
    FrameCache& cache = *requests_[begin].segment->cache();
    std::size_t end = begin + 1;
    while (end < requests_.size() && requests_[end].segment->cache().get() == &cache) ++end;
    cache.unpin({requests_.data() + begin, end - begin}, options_of(begin), thread_, failed);
    begin = end;
  }
  requests_.clear();
}

}  // namespace zeropage
