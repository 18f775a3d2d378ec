#include "zeropage/train/activations.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "zeropage/base/heap.h"
#include "zeropage/rules/call.h"

namespace zeropage {
namespace {

std::int64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

/// Bytes of its storage from the first to the last element.
std::size_t span_bytes(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return static_cast<std::size_t>(last + 1) * tensor.itemsize();
}

/// Bytes of its storage.
at::Tensor paged_copy(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, std::size_t begin,
                      std::size_t bytes) {
  auto* data = static_cast<std::byte*>(const_cast<void*>(tensor.storage().data())) + begin;
  const auto length = static_cast<std::int64_t>(bytes);
  const at::Tensor from = at::from_blob(
      data, {length}, [](void*) {}, tensor.options().dtype(at::kByte).requires_grad(false), tensor.device());
  const at::Tensor content =
      make_paged(domain, length, 1, from.dtype(), Role::activation, {.alone = true, .is_local = true});
  auto& segment = *segment_of(content);
  // In one frame, as backward will want it. A very large one goes page by page.
  if (bytes <= segment.cache()->frame_limit() / 2) {
    const PinRequest request{&segment, Access::overwrite};
    const TensorPin pin(request);
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
    content.copy_(from);
  } else {
    content.copy_(from);
  }
  if (tensor.is_cpu()) give_back_holes(bytes);
  return content;
}

}  // namespace

std::shared_ptr<SavedTensor> Activations::save(const at::Tensor& tensor) {
  c10::NoGradGuard no_grad;
  auto saved = std::make_shared<SavedTensor>();
  const auto domain = closed_ ? nullptr : domain_.lock();
  if (!domain || !can_page(*domain, tensor)) {
    saved->plain_ = tensor.detach();  // itself, it could own its own graph
    saved->version_ = version_of(tensor);
    return saved;
  }
  const std::size_t storage_bytes = tensor.storage().nbytes();
  const std::size_t first = tensor.storage_offset() * tensor.itemsize();
  std::size_t begin = first, bytes = span_bytes(tensor);
  if (2 * bytes >= storage_bytes) begin = 0, bytes = storage_bytes;  // its other views will be saved too
  saved->sizes_ = tensor.sizes().vec();
  saved->strides_ = tensor.strides().vec();
  saved->options_ = tensor.options().requires_grad(false);
  saved->activations_ = shared_from_this();
  std::unique_lock lock(mutex_);
  if (const Copied* known = find(tensor, first, span_bytes(tensor))) {
    saved->content_ = known->content.lock();
    saved->at_ = known->at + first - known->begin;
    if (saved->content_) return saved;
  }
  lock.unlock();
  saved->content_ = std::make_shared<const at::Tensor>(paged_copy(domain, tensor, begin, bytes));
  saved->at_ = first - begin;
  const auto& storage = tensor.storage().getWeakStorageImpl();
  note({storage, saved->content_, begin, bytes, 0, version_of(tensor)});
  return saved;
}

bool Activations::can_page(const Domain& domain, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided || tensor.device() != domain.device) return false;
  if (tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_quantized() || tensor.is_conj() || tensor.is_neg())
    return false;
  if (!tensor.has_storage() || segment_of(tensor) || tensor.numel() == 0) return false;
  const at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  if (base.is_leaf() && base.requires_grad()) return false;  // the program keeps it anyway
  if (!Call::plain_modes()) return false;
  const std::size_t bytes = span_bytes(tensor);
  return bytes >= std::max<std::size_t>(domain.resident_below, 1) && tensor.storage().data() != nullptr;
}

const Activations::Copied* Activations::find(const at::Tensor& tensor, std::size_t begin, std::size_t bytes) {
  const auto [from, to] = copied_.equal_range(tensor.storage().unsafeGetStorageImpl());
  for (auto entry = from; entry != to; ++entry) {
    const Copied& copied = entry->second;
    if (begin < copied.begin || begin + bytes > copied.begin + copied.bytes) continue;
    // The address may have become another storage's.
    if (copied.version == version_of(tensor) && copied.storage.use_count() > 0) return &copied;
  }
  return nullptr;
}

void Activations::note(Copied copied) {
  std::lock_guard lock(mutex_);
  if (copied_.size() >= prune_at_) {
    std::erase_if(copied_, [](const auto& entry) {
      return entry.second.storage.use_count() == 0 || entry.second.content.expired();
    });
    prune_at_ = std::max<std::size_t>(64, 2 * copied_.size());
  }
  const auto* key = copied.storage._unsafe_get_target();
  copied_.emplace(key, std::move(copied));
}

at::Tensor SavedTensor::open() const {
  if (!content_) {
    TORCH_CHECK(version_of(plain_) == version_,
                "one of the variables needed for gradient computation has been modified by an inplace operation: [",
                plain_.toString(), " ", plain_.sizes(), "] is at version ", version_of(plain_), "; expected version ",
                version_, " instead.");
    return plain_;
  }
  c10::NoGradGuard no_grad;
  if (options_.device().is_cpu()) give_back_holes(content_->nbytes());
  struct Held {
    TensorPin pin;  // first: it holds the segment
    std::shared_ptr<const at::Tensor> content;
  };
  const PinRequest request{segment_of(*content_), Access::read};
  auto held = std::make_shared<Held>(Held{TensorPin(request), content_});
  auto* data = static_cast<std::byte*>(content_->storage().mutable_data()) + at_;
  const at::Tensor opened = at::from_blob(data, sizes_, strides_, [held](void*) {}, options_, options_.device());
  activations_->note({opened.storage().getWeakStorageImpl(), content_, 0, opened.storage().nbytes(), at_, 0});
  return opened;
}

}  // namespace zeropage
