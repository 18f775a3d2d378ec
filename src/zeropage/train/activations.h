// Activations: what autograd saves for backward, paged out until backward needs it. Python's default saved-tensor
// hooks hand it over and take it back (python/zeropage/_activations.py); both run here.
//
// What is saved is copied into a paged tensor of role activation, so that its own memory is free when the program
// lets go of it. Backward gets an ordinary tensor over the frame, of the same strides, which is pinned while it
// lives; or a copy, where others lay between the elements: to some kernels other strides are other sums. What several
// operators save of the same elements is kept once. Parameters and other paged tensors are not copied, and small
// tensors stay where they are.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "zeropage/base/process.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

class SavedTensor;

/// What is saved in one space. It does not keep the space alive: without it, everything stays as it is.
class Activations : public std::enable_shared_from_this<Activations> {
 public:
  explicit Activations(const std::shared_ptr<Domain>& domain) : domain_(domain) {}

  /// Takes what autograd saves. Throws BudgetError or DiskError if its tier is full.
  std::shared_ptr<SavedTensor> save(const at::Tensor& tensor);
  /// From now on, everything stays as it is.
  void close() { closed_ = true; }
  bool is_open() const { return !closed_ && !domain_.expired(); }
  /// Whether content has no bytes.
  bool is_planned() const {
    const auto domain = domain_.lock();
    return domain && domain->planned_on;
  }

 private:
  friend class SavedTensor;

  /// Which elements of a storage were copied. Or the storage is one that backward was given, over a copy.
  struct Copied {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::weak_ptr<const at::Tensor> content;
    std::size_t begin, bytes;  // from the first to the last element
    // Sizes and strides, where others lie between the elements; else none.
    std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> view;
    std::int64_t version;  // of the storage's tensors then
    // Of sampled bytes, in the host's memory: writes through `.data`, or by foreign kernels, move no version.
    std::uint64_t fingerprint;
  };

  static bool can_page(const Domain& domain, const at::Tensor& tensor);
  std::shared_ptr<const at::Tensor> find(const Copied& wanted);
  void note(Copied copied);

  const std::weak_ptr<Domain> domain_;
  const std::uint64_t process_ = process_generation();
  std::atomic<bool> closed_ = false;
  std::mutex mutex_;
  std::multimap<const c10::StorageImpl*, Copied> copied_;
  std::size_t prune_at_ = 64;  // entries
};

/// One tensor that autograd saved.
class SavedTensor {
 public:
  /// What was saved. While it lives, its memory is pinned. Throws BudgetError, DiskError, and, for what was not
  /// copied and has been written since, c10::Error, as autograd does.
  at::Tensor open() const;

 private:
  friend class Activations;
  at::Tensor widened(const at::Tensor& opened) const;

  at::Tensor plain_;  // that was not copied; else undefined
  std::int64_t version_ = 0;
  std::shared_ptr<Activations> activations_;
  std::shared_ptr<const at::Tensor> content_;  // bytes
  std::vector<std::int64_t> sizes_, strides_;
  std::vector<std::int64_t> wide_strides_;  // that it had, if others lay between its elements; else none
  at::TensorOptions options_;
};

}  // namespace zeropage
