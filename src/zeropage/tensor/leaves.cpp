#include "zeropage/tensor/leaves.h"

#include <algorithm>
#include <vector>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {
namespace {

/// splitmix64's finalizer. Never 0, which is no key, and never a counted number.
std::uint64_t mix_key(std::uint64_t hash, std::uint64_t value) {
  std::uint64_t z = hash + 0x9e3779b97f4a7c15 * (value + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return (z ^ (z >> 31)) | (std::uint64_t{1} << 61);
}

std::mutex domains_mutex;
std::vector<std::weak_ptr<Domain>>& domains() {
  static auto* all = new std::vector<std::weak_ptr<Domain>>;
  return *all;
}

}  // namespace

std::uint64_t Leaves::free_key(const at::Tensor& leaf) const {
  const auto* segment = segment_of(leaf);
  std::uint64_t key = segment->number() ? segment->number() : segment->virtual_address();
  if (!is_whole(leaf)) {
    key = mix_key(key, static_cast<std::uint64_t>(leaf.storage_offset()));
    for (const auto& extents : {leaf.sizes(), leaf.strides()}) {
      for (const std::int64_t extent : extents) key = mix_key(key, static_cast<std::uint64_t>(extent));
    }
  }
  for (;; key = mix_key(key, 1)) {
    const auto known = by_key_.find(key);
    if (known == by_key_.end()) return key;
    const auto other = known->second.lock();
    if (!other || other.get() == leaf.unsafeGetTensorImpl()) return key;
  }
}

std::uint64_t Leaves::know(const at::Tensor& leaf) {
  std::lock_guard lock(mutex_);
  if (by_key_.size() >= forget_at_) forget_dead();
  const std::uint64_t key = free_key(leaf);
  by_key_.insert_or_assign(key, leaf.getIntrusivePtr());
  keys_.insert_or_assign(leaf.unsafeGetTensorImpl(), key);
  return key;
}

void Leaves::forget(const at::Tensor& leaf) {
  std::lock_guard lock(mutex_);
  const auto key = keys_.find(leaf.unsafeGetTensorImpl());
  if (key == keys_.end()) return;
  by_key_.erase(key->second);
  keys_.erase(key);
}

at::Tensor Leaves::find(std::uint64_t key) const {
  std::lock_guard lock(mutex_);
  const auto known = by_key_.find(key);
  if (known == by_key_.end()) return {};
  auto leaf = known->second.lock();
  return leaf ? at::Tensor(std::move(leaf)) : at::Tensor();
}

std::uint64_t Leaves::key_of(const at::Tensor& leaf) const {
  std::lock_guard lock(mutex_);
  const auto key = keys_.find(leaf.unsafeGetTensorImpl());
  if (key == keys_.end()) return 0;
  const auto known = by_key_.find(key->second);
  if (known == by_key_.end()) return 0;
  return known->second.lock().get() == leaf.unsafeGetTensorImpl() ? key->second : 0;
}

void Leaves::forget_dead() {
  std::erase_if(by_key_, [](const auto& entry) { return entry.second.expired(); });
  std::erase_if(keys_, [&](const auto& entry) { return !by_key_.contains(entry.second); });
  forget_at_ = std::max<std::size_t>(1024, 2 * by_key_.size());
}

void list_domain(const std::shared_ptr<Domain>& domain) {
  std::lock_guard lock(domains_mutex);
  std::erase_if(domains(), [](const auto& weak) { return weak.expired(); });
  domains().push_back(domain);
}

std::shared_ptr<Domain> domain_that_knows(const at::Tensor& leaf) {
  std::vector<std::weak_ptr<Domain>> all;
  {
    std::lock_guard lock(domains_mutex);
    all = domains();
  }
  for (const auto& weak : all) {
    if (auto domain = weak.lock(); domain && domain->leaves.key_of(leaf) != 0) return domain;
  }
  return nullptr;
}

std::shared_ptr<Domain> newest_domain() {
  std::lock_guard lock(domains_mutex);
  for (auto weak = domains().rbegin(); weak != domains().rend(); ++weak) {
    if (auto domain = weak->lock()) return domain;
  }
  return nullptr;
}

}  // namespace zeropage
