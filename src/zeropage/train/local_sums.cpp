#include "zeropage/train/local_sums.h"

#include <ATen/ops/from_blob.h>

#include "zeropage/base/errors.h"
#include "zeropage/base/no_paging_guard.h"
#include "zeropage/train/gradients.h"

namespace zeropage {

at::Tensor LocalSums::begin(const at::Tensor& leaf, const at::Tensor& gradient) {
  c10::NoGradGuard no_grad;
  const std::shared_ptr<Domain> domain = segment_of(leaf)->domain();
  const auto make = [&](std::optional<Tier> tier) {
    return make_paged(domain, leaf.sizes(), leaf.strides(), gradient_dtype(leaf), Role::gradient,
                      {.is_local = true, .is_unset = true, .tier = tier});
  };
  at::Tensor sum;
  try {
    sum = make(std::nullopt);
  } catch (const BudgetError& error) {
    if (!domain->cache->has_room(Tier::disk, leaf.nbytes())) {
      throw BudgetError(std::string(error.what()) +
                        "; under no_sync() each rank keeps whole gradients: let them go to the disk with "
                        "gradients=\"auto\", or leave no_sync() out");
    }
    sum = make(Tier::disk);
  }
  sum.copy_(gradient);
  std::lock_guard lock(mutex_);
  std::erase_if(begun_, [](const auto& begun) { return begun.second.expired(); });
  begun_.insert_or_assign(domain->leaves.know(leaf), segment_of(sum)->storage());
  return sum;
}

bool LocalSums::holds(const at::Tensor& leaf) const {
  const auto* const segment = segment_of(leaf);
  const at::Tensor gradient = leaf.grad();
  if (!segment || !gradient.defined() || !segment_of(gradient)) return false;
  std::lock_guard lock(mutex_);
  const auto found = begun_.find(segment->domain()->leaves.key_of(leaf));
  return found != begun_.end() && found->second.lock().get() == gradient.storage().unsafeGetStorageImpl();
}

at::Tensor LocalSums::take(const at::Tensor& leaf) {
  if (!holds(leaf)) return {};
  std::lock_guard lock(mutex_);
  begun_.erase(segment_of(leaf)->domain()->leaves.key_of(leaf));
  return std::exchange(leaf.mutable_grad(), at::Tensor());
}

std::vector<std::uint64_t> LocalSums::keys() const {
  std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> keys;
  for (const auto& [key, _] : begun_) keys.push_back(key);
  return keys;
}

void add_local_sum(const at::Tensor& gradient, const at::Tensor& sum) {
  c10::NoGradGuard no_grad;
  StorageSegment& segment = *segment_of(sum);
  segment.complete();
  const NoPagingGuard no_paging;
  const at::Tensor flat = gradient.as_strided(gradient.numel(), 1);
  const std::size_t page_elements = segment.page_bytes() / sum.itemsize();
  const auto elements = static_cast<std::size_t>(flat.numel());
  for (std::size_t page = 0, at = 0; at < elements; ++page, at += page_elements) {
    const auto length = static_cast<std::int64_t>(std::min(page_elements, elements - at));
    PagePin pin = segment.cache()->pin_page(segment, page, Access::read);
    pin.wait();
    flat.narrow(0, static_cast<std::int64_t>(at), length)
        .add_(at::from_blob(pin.data(), {length}, [](void*) {}, sum.options(), segment.domain()->device));
  }
}

}  // namespace zeropage
