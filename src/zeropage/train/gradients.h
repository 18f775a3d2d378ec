// Gradients become paged tensors where autograd accumulates them. A hook before a leaf's AccumulateGrad node turns
// the gradient that arrives into a paged tensor of the parameter's layout, if p.grad is still undefined; PyTorch then
// takes it as it would any other. If p.grad is paged already, PyTorch's own `grad += new` meets the rule for add_.
// User hooks, retain_grad, autograd.grad and create_graph keep their meaning, for nothing of them is replaced.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include "zeropage/train/reducer.h"

namespace zeropage {

/// Of a domain with ranks.
Reducer& reducer_of(const Domain& domain);

/// In what a leaf's gradient is summed and kept.
caffe2::TypeMeta gradient_dtype(const at::Tensor& leaf);

/// Over ranks, of a leaf of the domain whose `.data` was set: an ordinary tensor is paged, and one that is this
/// rank's own counts as the same on all. All ranks do it together. False, and nothing has happened, if there is
/// nothing to do.
bool page_again(at::Tensor& leaf, const std::shared_ptr<Domain>& domain);

/// What keeps a leaf's hook alive until the operator that met the leaf has made its own edge to the node: without it
/// the node, held weakly by the leaf, would die at once; held longer, it would keep the parameter alive.
using LeafHold = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// Puts the hook before the leaf's AccumulateGrad node unless it is there. `leaf` is a paged leaf that requires grad.
/// Under no_grad only a node that exists is hooked (a custom autograd function makes its edges before its forward).
LeafHold hook_gradient(const at::Tensor& leaf);
/// The paged leaf is one that no operator has met, until one does: nothing refers to it.
void forget_leaf(const at::Tensor& leaf);

}  // namespace zeropage
