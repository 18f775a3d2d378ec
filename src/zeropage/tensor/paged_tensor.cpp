#include "zeropage/tensor/paged_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/VariableHooksInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

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
  switch (domain.placement[static_cast<int>(role)]) {
    case Placement::device:
      return Tier::device;
    case Placement::host:
      return Tier::host;
    case Placement::disk:
      return Tier::disk;
    case Placement::automatic:
      break;
  }
  if (domain.pager->has_separate_memory() && domain.pager->has_room(Tier::device, bytes)) return Tier::device;
  const bool to_disk = !domain.pager->has_room(Tier::host, bytes) && domain.pager->has_room(Tier::disk, bytes);
  return to_disk ? Tier::disk : Tier::host;
}

std::unique_ptr<StorageSegment> new_segment(const std::shared_ptr<Domain>& domain, c10::StorageImpl& storage,
                                            c10::IntArrayRef sizes, std::size_t item_bytes, Role role) {
  auto segment = std::make_unique<StorageSegment>(domain, &storage);
  const std::size_t bytes = storage.nbytes();
  domain->pager->bind(*segment, {bytes, row_bytes(sizes, item_bytes), role, tier_for(*domain, role, bytes)});
  return segment;
}

/// From here on the storage holds the segment, and nothing of what it held.
void attach(std::unique_ptr<StorageSegment> segment, c10::StorageImpl& storage) {
  const auto device = segment->domain()->device;
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, segment.release(), &StorageSegment::destroy, device));
  compat::install_guard(storage, kRawAccess);
}

void copy_in(StorageSegment& segment, const std::byte* data) {
  for (std::size_t i = 0; i < segment.pages(); ++i) {
    PagePin page = segment.pager()->pin_page(segment, i, Access::overwrite);
    page.wait();
    page.fill(data + i * segment.page_bytes(), segment.bytes_of(i));
  }
}

}  // namespace

StorageSegment::StorageSegment(std::shared_ptr<Domain> domain, c10::StorageImpl* storage)
    : domain_(std::move(domain)), storage_(storage) {
  static std::atomic<std::uint64_t> next{std::uint64_t{1} << 56};  // above what processes are given
  virtual_address_ = next.fetch_add(round_up(storage->nbytes() + 1, 64));
}

void StorageSegment::point_to(void* data) {
  auto& held = storage_->_mutable_data_ptr_no_checks();
  (void)held.release_context();
  storage_->set_data_ptr_noswap(c10::DataPtr(data, this, &StorageSegment::destroy, domain_->device));
}

void StorageSegment::expose(std::byte* data) {
  point_to(data);
  compat::set_guard(*storage_, /*closed=*/false);
}

void StorageSegment::hide() {
  point_to(nullptr);
  compat::set_guard(*storage_, /*closed=*/true);
}

void StorageSegment::destroy(void* segment) {
  auto* dying = static_cast<StorageSegment*>(segment);
  if (dying->pager()) dying->pager()->release(*dying);
  delete dying;
}

bool is_whole(const at::TensorBase& tensor) {
  return tensor.storage_offset() == 0 &&
         tensor.numel() * tensor.itemsize() == tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() &&
         tensor.is_non_overlapping_and_dense();
}

at::Tensor make_paged(const std::shared_ptr<Domain>& domain, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      caffe2::TypeMeta dtype, Role role) {
  const std::size_t bytes = c10::multiply_integers(sizes) * dtype.itemsize();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       c10::DataPtr(nullptr, domain->device), nullptr,
                                                       /*resizable=*/false);
  attach(new_segment(domain, *storage, sizes, dtype.itemsize(), role), *storage);
  const auto backend = domain->device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(backend), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  compat::add_key(*tensor.unsafeGetTensorImpl(), kPagedKey);
  return tensor;
}

bool adopt(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, Role role) {
  if (segment_of(tensor)) return true;
  if (!tensor.defined() || tensor.layout() != c10::kStrided || tensor.device() != domain->device ||
      !tensor.has_storage() || tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_quantized() ||
      tensor.is_conj() || tensor.is_neg()) {
    return false;
  }
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (!domain->pages(storage.nbytes()) || !is_whole(tensor) || storage.use_count() != 1) return false;
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  const auto* data = static_cast<const std::byte*>(impl.data());
  auto segment = new_segment(domain, impl, tensor.sizes(), tensor.itemsize(), role);
  try {
    copy_in(*segment, data);
  } catch (...) {
    domain->pager->release(*segment);
    throw;
  }
  impl.set_resizable(false);
  attach(std::move(segment), impl);
  compat::add_key(*tensor.unsafeGetTensorImpl(), kPagedKey);
  return true;
}

TensorPin::TensorPin(c10::ArrayRef<PinRequest> requests) {
  // One call a pager; nearly always there is one.
  for (std::size_t begin = 0; begin < requests.size();) {
    Pager& pager = *requests[begin].segment->pager();
    std::size_t end = begin + 1;
    while (end < requests.size() && requests[end].segment->pager().get() == &pager) ++end;
    try {
      pager.pin({requests.data() + begin, end - begin});
    } catch (...) {
      TensorPin held = std::move(*this);
      throw;
    }
    requests_.append(requests.begin() + begin, requests.begin() + end);
    begin = end;
  }
}

TensorPin::~TensorPin() {
  for (std::size_t begin = 0; begin < requests_.size();) {
    Pager& pager = *requests_[begin].segment->pager();
    std::size_t end = begin + 1;
    while (end < requests_.size() && requests_[end].segment->pager().get() == &pager) ++end;
    pager.unpin({requests_.data() + begin, end - begin});
    begin = end;
  }
}

namespace {
thread_local std::shared_ptr<Domain> current_scope;
}

const std::shared_ptr<Domain>& scope_domain() { return current_scope; }

InitScope::InitScope(std::shared_ptr<Domain> domain)
    : outer_(std::exchange(current_scope, std::move(domain))),
      outer_included_(c10::impl::tls_is_dispatch_key_included(kPagedKey)) {
  c10::impl::tls_set_dispatch_key_included(kPagedKey, true);
}

InitScope::~InitScope() {
  c10::impl::tls_set_dispatch_key_included(kPagedKey, outer_included_);
  current_scope = std::move(outer_);
}

}  // namespace zeropage
