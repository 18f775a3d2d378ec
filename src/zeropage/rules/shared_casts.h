// Autocast casts a leaf once, keeps the cast until it ends, and so sums the gradients of all its uses in the lower
// precision. Of paged leaves nothing is kept: all casts would stay in memory. Each use casts again, and what the
// casts share is their node in autograd's graph, which holds no data: gradients meet in it as they do in plain
// PyTorch.
#pragma once

#include "zeropage/rules/call.h"

namespace zeropage {

class SharedCasts {
 public:
  /// Before the call runs, with autocast's cache as the program set it. `is_autocast`: whether autocast is on.
  SharedCasts(const Call& call, bool is_autocast);
  /// After it: casts of leaves in the graph of its results become those of earlier calls.
  void share(const Call& call) const;

 private:
  const bool is_on_;
  c10::DeviceType call_device_ = c10::kCPU;
  std::vector<torch::autograd::Node*> before_;  // the graphs of its arguments begin there
  std::uint64_t first_ = 0;                     // number of the first node that the call makes
};

/// The tensor in the dtype in which autocast, which is on, computes. Casts of a leaf share their node.
at::Tensor cast_once(const at::Tensor& tensor);

}  // namespace zeropage
