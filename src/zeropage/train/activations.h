// Activations: tensors that autograd saves for backward, paged out until backward needs them. Python's default
// saved-tensor hooks pass them here and ask for them back (python/zeropage/_activations.py).
//
// A saved tensor is copied into a paged tensor of role activation, so that its memory is free when the program drops
// it. Backward gets an ordinary tensor over the pinned frame, with the same strides. If the strides left gaps between
// the elements, it gets a copy: other strides can change a kernel's sums. If several operators save the same
// elements, there is one copy. Parameters and other paged tensors are not copied, and small tensors stay where they
// are.
//
// [Note: partitioned activations] If the space partitions activations, they are the same on all of its ranks. Those
// of a tensor-parallel group are, at the edges of a layer (ZeRO, section 6.1: P_a). Each rank keeps a share of each,
// and backward gathers it. Ranks save and open tensors in one order. They compare checksums of the first tensors and
// then now and then, because a wrong claim would otherwise give wrong gradients.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "zeropage/base/process.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

class SavedTensor;

/// The saved tensors of one space. It does not keep the space alive; without the space, tensors stay as they are.
class Activations : public std::enable_shared_from_this<Activations> {
 public:
  explicit Activations(const std::shared_ptr<Domain>& domain) : domain_(domain) {}

  /// Takes a tensor that autograd saves. Throws BudgetError or DiskError if its tier is full.
  std::shared_ptr<SavedTensor> save(const at::Tensor& tensor);
  /// From now on, saved tensors stay as they are.
  void close() { closed_ = true; }
  bool is_open() const { return !closed_ && !domain_.expired(); }
  /// Whether the space is a planned one, whose content has no bytes.
  bool is_planned() const {
    const auto domain = domain_.lock();
    return domain && domain->planned_on;
  }

 private:
  friend class SavedTensor;

  /// The elements of a storage that were copied. The storage may also be one over a copy, made for backward.
  struct Copied {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::weak_ptr<const at::Tensor> content;
    std::size_t begin, bytes;  // from the first to the last element
    // Sizes and strides if there are gaps between the elements; else none.
    std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> view;
    std::int64_t version;  // of the storage's tensors at the copy
    // Of sampled bytes, in host memory only: writes through `.data` or by foreign kernels change no version.
    std::uint64_t fingerprint;
  };

  void check_same(Domain& domain, const at::Tensor& tensor, std::size_t bytes);
  static bool can_page(const Domain& domain, const at::Tensor& tensor);
  std::shared_ptr<const at::Tensor> find(const Copied& wanted);
  void note(Copied copied);

  const std::weak_ptr<Domain> domain_;
  const std::uint64_t process_ = process_generation();
  std::atomic<bool> closed_ = false;
  std::atomic<std::size_t> checked_ = 0;  // partitioned tensors so far
  std::mutex mutex_;
  std::multimap<const c10::StorageImpl*, Copied> copied_;
  std::size_t prune_at_ = 64;  // entries
};

/// One tensor that autograd saved.
class SavedTensor {
 public:
  /// The saved tensor. Its memory is pinned while the result lives. Throws BudgetError and DiskError; also
  /// c10::Error, like autograd, if a tensor that was not copied has been written since.
  at::Tensor open() const;

 private:
  friend class Activations;
  at::Tensor widened(const at::Tensor& opened) const;

  at::Tensor plain_;  // the tensor, if it was not copied; else undefined
  std::int64_t version_ = 0;
  std::shared_ptr<Activations> activations_;
  std::shared_ptr<const at::Tensor> content_;  // bytes
  std::vector<std::int64_t> sizes_, strides_;
  std::vector<std::int64_t> wide_strides_;  // its own, if they left gaps between its elements; else none
  at::TensorOptions options_;
};

}  // namespace zeropage
