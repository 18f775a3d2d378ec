#include "zeropage/rules/shared_casts.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string_view>
#include <unordered_set>

namespace zeropage {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

/// A std::shared_ptr up to torch 2.12, then a c10::intrusive_ptr.
using NodePointer = decltype(Edge::function);
template <class Pointer>
struct Weak {
  using type = c10::weak_intrusive_ptr<Node>;
};
template <>
struct Weak<std::shared_ptr<Node>> {
  using type = std::weak_ptr<Node>;
};
using WeakNode = Weak<NodePointer>::type;

/// The casts since autocast last cleared its cache. A node lives as long as a graph that uses it.
class Known {
 public:
  static Known& instance() {
    static auto* known = new Known;
    return *known;
  }

  /// The known cast of this leaf; else `made`, which it remembers.
  NodePointer find(const at::Tensor& leaf, const NodePointer& made) {
    std::lock_guard lock(mutex_);
    const void* const key = leaf.unsafeGetTensorImpl();
    const auto known = casts_.find(key);
    const NodePointer node = known != casts_.end() ? known->second.lock() : NodePointer();
    // Another leaf may have this address now.
    const auto* grad = node ? dynamic_cast<AccumulateGrad*>(node->next_edge(0).function.get()) : nullptr;
    if (grad && grad->variable.is_same(leaf)) return node;
    casts_.insert_or_assign(key, WeakNode(made));
    return made;
  }

  /// Forgets all casts once autocast has cleared its cache, which held a cast of our own number.
  void forget_with_autocast(c10::Device device) {
    std::lock_guard lock(mutex_);
    const OutsideModes unseen;  // otherwise a number made under a mode would stay
    at::Tensor& number = numbers_[device.type()];
    if (!number.defined()) number = at::ones({1}, at::device(device).dtype(at::kFloat)).requires_grad_();
    const auto dtype = at::autocast::get_autocast_dtype(device.type());
    const at::Tensor cast = at::autocast::cached_cast(dtype, number, device.type());
    at::Tensor& latest = latest_[device.type()];
    if (latest.is_same(cast)) return;
    latest = cast;
    casts_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<const void*, WeakNode> casts_;
  std::map<c10::DeviceType, at::Tensor> numbers_, latest_;
};

/// Whether autocast casts the tensor once and keeps the cast.
bool is_cached(const at::Tensor& tensor) {
  return tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view() && tensor.scalar_type() == c10::kFloat;
}

/// The node that the casts of a leaf share. For an ordinary leaf it is that of autocast's cached cast, which
/// operators outside zeropage use too. The first cast's node is `made`, with the number that plain PyTorch gives it.
NodePointer shared_node(const at::Tensor& leaf, c10::ScalarType lower, const NodePointer& made) {
  if (segment_of(leaf)) return Known::instance().find(leaf, made);
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const auto first_free = at::sequence_number::peek();
  const at::Tensor cast = at::autocast::cached_cast(lower, leaf, leaf.device().type());
  const bool is_first = at::sequence_number::peek() != first_free;
  if (is_first) torch::autograd::impl::set_gradient_edge(cast, Edge(made, 0));
  return cast.grad_fn();
}

bool is_cast(const Node& node) {
  return std::string_view(typeid(node).name()).find("ToCopyBackward0") != std::string_view::npos;
}

/// The leaf that a new node casts, paged or not: autocast's cache is off during the call.
at::Tensor leaf_of(const Node& node, c10::ScalarType lower) {
  if (!is_cast(node) || node.num_outputs() != 1 || node.num_inputs() != 1) return {};
  if (c10::typeMetaToScalarType(node.input_metadata(0).options().dtype()) != lower) return {};
  const auto* grad = dynamic_cast<const AccumulateGrad*>(node.next_edge(0).function.get());
  return grad && is_cached(grad->variable) ? grad->variable : at::Tensor();
}

}  // namespace

SharedCasts::SharedCasts(const Call& call, bool is_autocast)
    : is_on_(is_autocast && at::autocast::is_autocast_cache_enabled() && c10::GradMode::is_enabled() &&
             Call::plain_modes()) {
  if (!is_on_) return;
  const c10::Device device = call.paged[0].tensor.device();
  call_device_ = device.type();
  // Each thread numbers its own nodes. Remember the arguments' nodes, because other threads may have made them.
  const auto note = [&](const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    if (auto node = value.toTensor().grad_fn()) before_.push_back(node.get());
  };
  for (std::size_t i = call.first; i < call.stack.size(); ++i) {
    note(call.stack[i]);
    if (!call.stack[i].isList()) continue;
    for (const c10::IValue& element : call.stack[i].toListRef()) note(element);
  }
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  Known::instance().forget_with_autocast(device);
  first_ = at::sequence_number::peek();
}

void SharedCasts::share(const Call& call) const {
  if (!is_on_) return;
  std::vector<Node*> nodes;
  std::unordered_set<Node*> seen(before_.begin(), before_.end());
  const auto lower = at::autocast::get_autocast_dtype(call_device_);
  const auto visit = [&](Node* node) {
    if (node && node->sequence_nr() >= first_ && seen.insert(node).second) nodes.push_back(node);
  };
  const auto visit_result = [&](const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor().grad_fn().get());
  };
  for (std::size_t i = call.first; i < call.stack.size(); ++i) {
    const c10::IValue& value = call.stack[i];
    visit_result(value);
    if (value.isTensorList()) {
      for (const c10::IValue& element : value.toListRef()) visit_result(element);
    }
  }
  struct Use {
    NodePointer cast;
    at::Tensor leaf;
    Edge* edge;  // from a user of the cast
  };
  std::vector<Use> uses;
  while (!nodes.empty()) {
    Node* const node = nodes.back();
    nodes.pop_back();
    for (Edge& edge : node->next_edges()) {
      if (!edge.function || edge.function->sequence_nr() < first_) continue;
      if (at::Tensor leaf = leaf_of(*edge.function, lower); leaf.defined()) {
        uses.push_back({edge.function, std::move(leaf), &edge});
      } else {
        visit(edge.function.get());
      }
    }
  }
  // Autocast keeps the first cast of a leaf. Backward runs nodes in the order of their numbers.
  std::ranges::sort(uses, {}, [](const Use& use) { return use.cast->sequence_nr(); });
  for (Use& use : uses) *use.edge = Edge(shared_node(use.leaf, lower, use.cast), 0);
}

at::Tensor cast_once(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  const auto lower = at::autocast::get_autocast_dtype(device.type());
  at::Tensor cast = tensor.to(lower);
  if (!cast.grad_fn() || !is_cached(tensor) || !at::autocast::is_autocast_cache_enabled()) return cast;
  Known::instance().forget_with_autocast(device);
  torch::autograd::impl::set_gradient_edge(cast, Edge(shared_node(tensor, lower, cast.grad_fn()), 0));
  return cast;
}

}  // namespace zeropage
