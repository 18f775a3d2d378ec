#include "zeropage/train/gradients.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "zeropage/rules/windows.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {
namespace {

using torch::autograd::variable_list;

class PageGradient final : public torch::autograd::FunctionPreHook {
 public:
  explicit PageGradient(torch::autograd::AccumulateGrad* node) : node_(node) {}

  variable_list operator()(const variable_list& gradients) override {
    const at::Tensor& leaf = node_->variable;
    const at::Tensor& gradient = gradients[0];
    const auto* segment = segment_of(leaf);
    if (!segment || !gradient.defined() || leaf.grad().defined() || segment_of(gradient)) return gradients;
    // With create_graph the gradient has a history of its own; a sparse one has no pages.
    if (gradient.requires_grad() || gradient.layout() != c10::kStrided || gradient.device() != leaf.device()) {
      return gradients;
    }
    if (gradient.sizes() != leaf.sizes() || !leaf.is_non_overlapping_and_dense()) return gradients;
    if (gradient.key_set().has(c10::DispatchKey::Python) || !segment->domain()->pages(gradient.nbytes())) return gradients;
    return {paged_copy(*segment, leaf, gradient)};
  }

 private:
  static at::Tensor paged_copy(const StorageSegment& segment, const at::Tensor& leaf, const at::Tensor& gradient) {
    c10::NoGradGuard no_grad;
    at::Tensor paged = make_paged(segment.domain(), leaf.sizes(), leaf.strides(), gradient.dtype(), Role::gradient);
    paged.copy_(gradient);
    return paged;
  }

  torch::autograd::AccumulateGrad* node_;  // which owns this hook
};

}  // namespace

LeafHold hook_gradient(const at::Tensor& leaf) {
  auto node = c10::GradMode::is_enabled() ? torch::autograd::impl::grad_accumulator(leaf)
                                          : torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (!node) return node;
  for (const auto& hook : node->pre_hooks()) {
    if (dynamic_cast<PageGradient*>(hook.get())) return node;
  }
  if (auto* accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get())) {
    node->add_pre_hook(std::make_unique<PageGradient>(accumulate));
  }
  return node;
}

}  // namespace zeropage
