#include <torch/nn/module.h>

#include "zeropage/space/space.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

void Space::page(torch::nn::Module& module) {
  const auto parameters = module.parameters();
  for (at::Tensor parameter : parameters) {
    // Paged tensors are equal on all ranks already. Rank 0's may be stale, because each rank updates its share.
    const bool has_other_gradient = parameter.grad().defined() && !is_paged(parameter.grad());
    if (!is_paged(parameter) || has_other_gradient) page(parameter);
    if (auto* segment = segment_of(parameter); segment && !segment->is_own()) segment->set_keeps_same(true);
  }
  for (at::Tensor buffer : module.buffers()) {
    if (is_paged(buffer) || page(buffer)) keep_whole(buffer);
  }
  start_equal();  // once, so that small tensors are sent together
  for (at::Tensor parameter : parameters) mix(parameter);
}

}  // namespace zeropage
