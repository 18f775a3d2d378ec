#include "zeropage/train/activations.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cstring>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/kernels/copy.h"
#include "zeropage/rules/call.h"
#include "zeropage/rules/lazy_product.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

/// Bytes of its storage from the first to the last element.
std::size_t span_bytes(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

/// Bytes of a copy that the caches would not keep until backward reads it.
constexpr std::size_t kPastCaches = kMiB;

/// The same as memcpy, on ATen's threads.
void copy_past_caches(void* to, const void* from, std::size_t bytes) {
  constexpr std::int64_t kLeast = 128 * kKiB;  // for a thread
  at::parallel_for(0, static_cast<std::int64_t>(bytes), kLeast, [&](std::int64_t begin, std::int64_t end) {
    kernels::copy_past_caches(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                              end - begin);
  });
}

/// Not in backward: there a checkpoint computes a layer again, and saves what is of this rank alone. Nor if backward
/// could not gather it.
bool is_partitioned(const Domain& domain, std::size_t bytes) {
  return domain.partition.ranks && domain.layout_for(Role::activation, bytes) == Layout::partitioned &&
         torch::autograd::get_current_graph_task_id() < 0 &&
         round_up(domain.stripes(bytes).padded(), kBlockBytes) <= domain.gathered->frame_limit();
}

/// A paged copy: of the storage's bytes if the strides are its own, else of the elements alone.
at::Tensor paged_copy(const std::shared_ptr<Domain>& domain, const at::Tensor& tensor, c10::IntArrayRef strides,
                      std::size_t bytes) {
  const auto length = static_cast<std::int64_t>(bytes);
  const auto options = tensor.options().requires_grad(false);
  const bool as_they_lie = tensor.strides() == strides;
  const auto bytes_at = [&](const void* data) {
    return at::from_blob(const_cast<void*>(data), {length}, [](void*) {}, options.dtype(at::kByte), tensor.device());
  };
  const bool is_shared = is_partitioned(*domain, bytes);
  const at::Tensor content = make_paged(domain, length, 1, caffe2::TypeMeta::Make<std::uint8_t>(), Role::activation,
                                        {.alone = true, .is_local = !is_shared, .is_unset = true});
  if (is_shared) {
    fill_share(content, domain->planned_on ? nullptr : tensor.const_data_ptr());  // in its own strides
    return content;
  }
  auto& segment = *segment_of(content);
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const auto copy_whole = [&] {  // in one frame, as backward will need it
    const PinRequest request{&segment, Access::overwrite};
    const TensorPin pin(request);
    void* const data = content.storage().mutable_data();
    const Booking copies(Spent::copies);
    if (as_they_lie && bytes >= kPastCaches && tensor.is_cpu() && !domain->planned_on) {
      copy_past_caches(data, tensor.const_data_ptr(), bytes);
    } else if (as_they_lie) {
      bytes_at(data).copy_(bytes_at(tensor.const_data_ptr()));
    } else {
      at::from_blob(data, tensor.sizes(), strides, [](void*) {}, options, tensor.device()).copy_(tensor);
    }
  };
  const auto copy_by_pages = [&] {
    const Booking copies(Spent::copies);
    const at::Tensor packed =
        as_they_lie ? tensor : at::empty_strided(tensor.sizes(), strides, options).copy_(tensor);
    copy_windows(content, bytes_at(packed.const_data_ptr()));
  };
  if (bytes > segment.cache()->frame_limit() / 2) {
    copy_by_pages();
  } else {
    try {
      copy_whole();
    } catch (const BudgetError&) {  // the operator that saves it holds the memory
      copy_by_pages();
    }
  }
  return content;
}

/// A hash of the words at every `step` bytes.
std::uint64_t hash_of(const void* memory, std::size_t bytes, std::size_t step) {
  const auto* const data = static_cast<const std::byte*>(memory);
  std::uint64_t sum = bytes;
  for (std::size_t at = 0; at < bytes; at += step) {
    std::uint64_t value = 0;
    std::memcpy(&value, data + at, std::min(sizeof value, bytes - at));
    sum = (sum ^ value) * 0x9e3779b97f4a7c15;
    sum ^= sum >> 32;
  }
  return sum;
}

/// A hash of all `bytes` of a tensor's memory.
std::uint64_t checksum_of(const at::Tensor& tensor, std::size_t bytes) {
  const auto options = tensor.options().dtype(at::kByte).requires_grad(false);
  const at::Tensor there = at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), {static_cast<std::int64_t>(bytes)}, [](void*) {}, options,
      tensor.device());
  return hash_of(there.cpu().const_data_ptr(), bytes, sizeof(std::uint64_t));
}

/// Hashes some 512 words of the tensor's span, evenly spread; 0 on a device.
std::uint64_t fingerprint_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return 0;
  const std::size_t bytes = span_bytes(tensor);
  return hash_of(tensor.const_data_ptr(), bytes, std::max(bytes / 512, sizeof(std::uint64_t)));
}

}  // namespace

std::shared_ptr<SavedTensor> Activations::save(const at::Tensor& tensor) {
  c10::NoGradGuard no_grad;
  auto saved = std::make_shared<SavedTensor>();
  const bool forked = process_generation() != process_;  // a child has no pages
  const auto domain = closed_ || forked ? nullptr : domain_.lock();
  if (!domain || !can_page(*domain, tensor)) {
    saved->plain_ = tensor.detach();  // the tensor itself could own its own graph
    saved->version_ = version_of(tensor);
    return saved;
  }
  const Booking booking(&domain->cache->booked(), Spent::overhead);
  Copied copied{tensor.storage().getWeakStorageImpl(),
                {},
                static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize(),
                span_bytes(tensor),
                {},
                version_of(tensor),
                domain->planned_on ? 0 : fingerprint_of(tensor)};
  saved->sizes_ = tensor.sizes().vec();
  saved->strides_ = tensor.strides().vec();
  saved->options_ = tensor.options().requires_grad(false);
  saved->activations_ = shared_from_this();
  std::size_t bytes = copied.bytes;
  if (bytes > tensor.nbytes()) {  // there are gaps between its elements
    copied.view = {saved->sizes_, saved->strides_};
    saved->wide_strides_ = std::exchange(saved->strides_, at::infer_dense_strides(tensor.sizes(), tensor.strides()));
    bytes = tensor.nbytes();
  }
  saved->content_ = find(copied);
  if (saved->content_) return saved;
  at::Tensor kept = tensor;
  if (is_partitioned(*domain, bytes)) {
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
    if (tensor.strides() != saved->strides_)
      kept = at::empty_strided(tensor.sizes(), saved->strides_, saved->options_).copy_(tensor);
    check_same(*domain, kept, bytes);
  }
  saved->content_ = std::make_shared<const at::Tensor>(paged_copy(domain, kept, saved->strides_, bytes));
  copied.content = saved->content_;
  note(std::move(copied));
  return saved;
}

void Activations::check_same(Domain& domain, const at::Tensor& tensor, std::size_t bytes) {
  constexpr std::size_t kAlwaysChecked = 256, kCheckedEvery = 64;
  const std::size_t number = checked_++;
  if (domain.planned_on || (number >= kAlwaysChecked && number % kCheckedEvery != 0)) return;
  const auto mine = static_cast<std::int64_t>(checksum_of(tensor, bytes));
  const auto all = domain.partition.ranks->agree({mine}, {"an activation", number + 1, 0});
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank][0] == all[0][0]) continue;
    throw RankError(fmt::format(
        "partition names activations, but ranks 0 and {} save different values in a tensor [{}]: name only "
        "a group whose ranks compute the same between layers, and checkpoint the layers "
        "(torch.utils.checkpoint), or leave activations out of partition",
        rank, fmt::join(tensor.sizes(), ", ")));
  }
}

bool Activations::can_page(const Domain& domain, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided || tensor.device() != domain.device) return false;
  if (tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_quantized() || tensor.is_conj() || tensor.is_neg())
    return false;
  if (!tensor.has_storage() || segment_of(tensor) || LazyProduct::of(tensor) || tensor.numel() == 0) return false;
  const at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  if (base.is_leaf() && base.requires_grad()) return false;  // the program keeps it anyway
  if (!Call::plain_modes()) return false;
  const std::size_t bytes = std::min(span_bytes(tensor), tensor.nbytes());
  if (bytes > domain.cache->frame_limit() && !is_partitioned(domain, bytes))
    return false;  // backward could not get it
  return bytes >= std::max<std::size_t>(domain.min_page_bytes, 1) && (tensor.storage().data() || domain.planned_on);
}

std::shared_ptr<const at::Tensor> Activations::find(const Copied& wanted) {
  std::lock_guard lock(mutex_);
  const auto [from, to] = copied_.equal_range(wanted.storage._unsafe_get_target());
  for (auto entry = from; entry != to; ++entry) {
    const Copied& copied = entry->second;
    const bool same = copied.begin == wanted.begin && copied.bytes == wanted.bytes && copied.view == wanted.view;
    // The address may now be another storage's.
    if (!same || copied.version != wanted.version || copied.fingerprint != wanted.fingerprint) continue;
    if (copied.storage.use_count() == 0) continue;
    if (auto content = copied.content.lock()) return content;
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

/// A copy with the tensor's own strides. Undefined if `opened` has them, or if they are not worth the memory.
at::Tensor SavedTensor::widened(const at::Tensor& opened) const {
  if (wide_strides_.empty()) return {};
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    if (wide_strides_[i] == 0 && sizes_[i] > 1) return {};
  }
  // On the CPU, untouched parts of the copy take no memory.
  const std::size_t span = at::detail::computeStorageNbytes(sizes_, wide_strides_, opened.itemsize());
  if (!opened.is_cpu() && span > 4 * opened.nbytes()) return {};
  const Booking copies(Spent::copies);
  return at::empty_strided(sizes_, wide_strides_, options_).copy_(opened);
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
  const Booking booking(&segment_of(*content_)->domain()->cache->booked(), Spent::overhead);
  struct Held {
    TensorPin pin;  // first: it holds the segment
    std::shared_ptr<const at::Tensor> content;
  };
  const PinRequest request{segment_of(*content_), Access::read};
  auto held = std::make_shared<Held>(Held{TensorPin(request, {.lasting = true}), content_});
  void* const data = content_->storage().mutable_data();
  const at::Tensor opened = at::from_blob(data, sizes_, strides_, [held](void*) {}, options_, options_.device());
  if (at::Tensor wide = widened(opened); wide.defined()) return wide;
  const bool is_real = !activations_->is_planned();
  activations_->note({opened.storage().getWeakStorageImpl(),
                      content_,
                      0,
                      span_bytes(opened),
                      {},
                      0,
                      is_real ? fingerprint_of(opened) : 0});
  return opened;
}

}  // namespace zeropage
