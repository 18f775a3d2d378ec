// The leaves of one space: parameters that require gradients, under keys that are the same on all ranks.
//
// [Note: keys of leaves] A leaf's key is the number of its storage. For leaves over one storage the key also depends
// on the part of it that they cover, and on the order in which operators met them. A leaf keeps its key when `p.data
// = other` gives it an ordinary storage, so that it can be paged again.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace zeropage {

struct Domain;

class Leaves {
 public:
  /// Registers a paged leaf and returns its key.
  std::uint64_t know(const at::Tensor& leaf);
  /// Removes the leaf.
  void forget(const at::Tensor& leaf);
  /// Undefined if there is none, or it died.
  at::Tensor find(std::uint64_t key) const;
  /// The key of a registered leaf, paged or not; 0: it is not registered.
  std::uint64_t key_of(const at::Tensor& leaf) const;

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::uint64_t free_key(const at::Tensor& leaf) const;
  void forget_dead();

  mutable std::mutex mutex_;
  std::map<std::uint64_t, Weak> by_key_;
  std::unordered_map<const c10::TensorImpl*, std::uint64_t> keys_;
  std::size_t forget_at_ = 1024;  // entries
};

/// Adds a domain to those that domain_that_knows() searches while they live.
void list_domain(const std::shared_ptr<Domain>& domain);
/// The domain in which a tensor that is not paged was a paged leaf, or null.
std::shared_ptr<Domain> domain_that_knows(const at::Tensor& leaf);
/// The newest domain that lives, or null.
std::shared_ptr<Domain> newest_domain();

}  // namespace zeropage
