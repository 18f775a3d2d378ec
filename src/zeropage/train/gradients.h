// Autograd's accumulated gradients become paged tensors. A hook before a leaf's AccumulateGrad node acts if p.grad is
// still undefined: it makes the gradient a paged tensor of the parameter's layout, and PyTorch accepts it. If p.grad
// is already paged, PyTorch's own `grad += new` reaches the rule for add_. User hooks, retain_grad, autograd.grad and
// create_graph keep their meaning, since none of them is replaced.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include "zeropage/train/reducer.h"

namespace zeropage {

/// The domain must have ranks.
Reducer& reducer_of(const Domain& domain);

/// The dtype in which a leaf's gradient is summed and kept.
caffe2::TypeMeta gradient_dtype(const at::Tensor& leaf);

/// Over ranks, repairs a leaf of the domain whose `.data` was set. An ordinary tensor is paged; a tensor of this
/// rank's own counts as the same on all ranks. All ranks call it together. Returns false, without effect, if there is
/// nothing to do.
bool page_again(at::Tensor& leaf, const std::shared_ptr<Domain>& domain);

/// Pages a tensor whose data is now that of the ordinary tensor `data`, which keeps sharing it if nothing else does.
/// Undefined `data`: nobody shares it. `number`: the tensor's earlier number on all ranks; 0: one process. Returns
/// false, with a warning, if paging would end the sharing of memory; false if the tensor cannot be paged. Throws
/// BudgetError or DiskError; the tensor then keeps the new data and is not paged.
bool page_data(const std::shared_ptr<Domain>& domain, at::Tensor& tensor, const at::Tensor& data, Role role,
               std::uint64_t number);

/// Keeps a leaf's hook alive until the operator that met the leaf has made its own edge to the node. The leaf holds
/// the node weakly, so without this the node would die at once. Held longer, it would keep the parameter alive.
using LeafHold = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// Adds the hook to the leaf's AccumulateGrad node, unless it is there. `leaf` is a paged leaf that requires grad.
/// Under no_grad it only hooks an existing node (a custom autograd function makes its edges before its forward).
LeafHold hook_gradient(const at::Tensor& leaf);
/// A leaf's gradient. If a parameter keeps the leaf inside, the tensor that its gradient keeps inside (Outer).
at::Tensor gradient_of(const at::Tensor& leaf);
void set_gradient(const at::Tensor& leaf, const at::Tensor& gradient);
/// For an optimizer's step, until narrow(): replaces gradients that the program has set in 16 bits, the dtype of what
/// it sees of a leaf with a master, by float32 ones, because kernels want one dtype.
class WidenedGradients {
 public:
  explicit WidenedGradients(c10::ArrayRef<at::Tensor> leaves);
  ~WidenedGradients();
  WidenedGradients(const WidenedGradients&) = delete;
  WidenedGradients& operator=(const WidenedGradients&) = delete;
  /// Gives the leaves their own gradients back, with what the step has written into them.
  void narrow();

 private:
  struct Widened;
  WidenedGradients();
  std::vector<Widened> widened_;
};
/// The same as the hook for a leaf that a parameter keeps inside. `gradient`: the tensor inside the gradient that
/// backward made for the parameter. Returns the tensor inside the gradient that AccumulateGrad shall take instead.
at::Tensor inner_gradient(const at::Tensor& leaf, const at::Tensor& gradient);
/// Marks the paged leaf as one that no operator has met yet, because nothing refers to it.
void forget_leaf(const at::Tensor& leaf);

}  // namespace zeropage
