// Gradients that a rank accumulates for itself, in micro-batches under no_sync(). They are tensors of this rank
// alone, whole, at the home of gradients. The next backward that sums over ranks takes them and adds its own
// gradient.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

class LocalSums {
 public:
  /// Begins one with the content of `gradient`, to become p.grad: a paged tensor like `leaf`. If the home of
  /// gradients has no room for whole tensors, it is on the disk. Throws BudgetError.
  at::Tensor begin(const at::Tensor& leaf, const at::Tensor& gradient);
  /// Whether the leaf's p.grad is one.
  bool holds(const at::Tensor& leaf) const;
  /// Takes the leaf's, so that p.grad becomes undefined. Undefined if p.grad is none.
  at::Tensor take(const at::Tensor& leaf);
  /// Makes one that was taken p.grad again, if that is still undefined.
  void give_back(const at::Tensor& leaf, const at::Tensor& sum);
  /// Keys of leaves that have one, or had it until the program replaced it.
  std::vector<std::uint64_t> keys() const;

 private:
  mutable std::mutex mutex_;
  std::set<std::uint64_t> keys_;
};

/// Adds a local sum to `gradient`, a dense tensor in plain memory.
void add_local_sum(const at::Tensor& gradient, const at::Tensor& sum);

}  // namespace zeropage
