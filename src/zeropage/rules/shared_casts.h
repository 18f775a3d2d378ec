// Autocast casts a leaf once and keeps the cast until it ends. It thus sums the gradients of all uses in the lower
// precision. Casts of paged leaves are not kept, because all of them would stay in memory. Each use casts again. The
// casts share their node in autograd's graph, which holds no data, so that gradients meet in it like in plain
// PyTorch.
#pragma once

#include "zeropage/rules/call.h"

namespace zeropage {

class SharedCasts {
 public:
  /// Constructed before the call runs, with autocast's cache as the program set it. `is_autocast`: autocast is on.
  SharedCasts(const Call& call, bool is_autocast);
  /// Replaces casts of leaves in the graph of the call's results by those of earlier calls. Called after it ran.
  void share(const Call& call) const;

 private:
  const bool is_on_;
  c10::DeviceType call_device_ = c10::kCPU;
  std::vector<torch::autograd::Node*> before_;  // where the graphs of its arguments begin.
  std::uint64_t first_ = 0;                     // number of the first node that the call makes.
};

/// Casts the tensor to autocast's dtype; autocast must be on. Casts of a leaf share their node.
at::Tensor cast_once(const at::Tensor& tensor);

}  // namespace zeropage
