#include "zeropage/train/gradients.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <mutex>
#include <typeinfo>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/rules/call.h"
#include "zeropage/rules/mixed.h"
#include "zeropage/rules/norms.h"
#include "zeropage/rules/placement.h"
#include "zeropage/rules/rows_to_come.h"
#include "zeropage/rules/speculation.h"
#include "zeropage/rules/widened.h"
#include "zeropage/rules/windows.h"
#include "zeropage/store/file_memory.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {
namespace {

using torch::autograd::variable_list;

/// Gives access to the mutex that a node locks while it adds to the leaf's gradient.
struct NodeMutex : torch::autograd::Node {
  static std::mutex& of(torch::autograd::Node& node) { return node.*(&NodeMutex::mutex_); }
};

class PageGradient final : public torch::autograd::FunctionPreHook {
 public:
  PageGradient(torch::autograd::AccumulateGrad* node, std::weak_ptr<Domain> domain)
      : node_(node), domain_(std::move(domain)) {}

  variable_list operator()(const variable_list& gradients) override {
    try {
      const at::Tensor& leaf = node_->variable;
      // AccumulateGrad drops the gradient of a leaf that the program has frozen since forward.
      if (!gradients[0].defined() || !leaf.requires_grad()) return gradients;
      if (!segment_of(leaf)) {  // `leaf.data = ordinary` was set after the operator met it
        const auto domain = domain_.lock();
        at::Tensor same = leaf;
        if (!domain || !page_again(same, domain)) return gradients;
      }
      return {paged(leaf, gradients[0], node_)};
    } catch (const Error& error) {
      throw_translated(error);
    }
  }

  /// The tensor that AccumulateGrad shall make the paged leaf's gradient, or add to it. `node`: null for a leaf that
  /// a parameter keeps inside.
  static at::Tensor paged(const at::Tensor& leaf, const at::Tensor& gradient, torch::autograd::AccumulateGrad* node) {
    // PyTorch's zero tensors have no memory, but the code below reads the gradient.
    if (gradient._is_zerotensor()) return page(leaf, materialised(gradient), node);
    return page(leaf, gradient, node);  // no copy of it: ranks may take its memory as it is if nobody else holds it
  }

 private:
  static at::Tensor materialised(const at::Tensor& zeros) {
    c10::NoGradGuard no_grad;
    return at::zeros(zeros.sizes(), zeros.options());
  }

  static at::Tensor page(const at::Tensor& leaf, const at::Tensor& gradient, torch::autograd::AccumulateGrad* node) {
    auto* const segment = segment_of(leaf);
    const Booking booking(&segment->domain()->cache->booked(), Spent::overhead);
    if (segment->domain()->partition.ranks) return over_ranks(leaf, gradient);
    // An operator that used the whole leaf since its step has run the update. Lookups leave it deferred (preview.h).
    const bool is_left = segment->is_deferred() && segment->has_deferred_write();
    if (is_left) segment->run_deferred();
    const bool is_last = note_arrival(*segment, is_left);
    if (segment_of(gradient)) {
      // AccumulateGrad cannot see that other gradients share the tensor inside.
      c10::NoGradGuard no_grad;
      return node ? widened_if_mixed(*segment, leaf, gradient) : gradient.clone();
    }
    if (gradient.layout() != c10::kStrided && segment->master().defined()) return widened_sparse(leaf, gradient);
    // With create_graph the gradient has a history of its own. A sparse gradient has no pages.
    if (gradient.requires_grad() || gradient.layout() != c10::kStrided || gradient.device() != leaf.device()) {
      return gradient;
    }
    if (gradient.sizes() != leaf.sizes() || !leaf.is_non_overlapping_and_dense()) return gradient;
    if (gradient.key_set().has(c10::DispatchKey::Python) || !segment->domain()->pages(gradient.nbytes()))
      return gradient;
    if (gradient_of(leaf).defined()) {
      return is_last && node && can_accumulate(leaf, *node) ? accumulate(*segment, leaf, gradient, *node) : gradient;
    }
    at::Tensor paged = paged_copy(*segment, leaf, gradient);
    if (is_last) early_update(*segment, paged);
    return paged;
  }

  /// Widens a gradient that is already paged, such as one computed in tiles.
  static at::Tensor widened_if_mixed(const StorageSegment& segment, const at::Tensor& leaf,
                                     const at::Tensor& gradient) {
    const bool widens = segment.master().defined() && !gradient_of(leaf).defined() &&
                        gradient_dtype(leaf) == at::kFloat && c10::isReducedFloatingType(gradient.scalar_type()) &&
                        is_operand(gradient, leaf);
    return widens ? widened(gradient) : gradient;
  }

  static at::Tensor widened_sparse(const at::Tensor& leaf, const at::Tensor& gradient) {
    c10::NoGradGuard no_grad;
    const bool widens = gradient_dtype(leaf) == at::kFloat && c10::isReducedFloatingType(gradient.scalar_type());
    return widens ? gradient.to(at::kFloat) : gradient;
  }

  /// Whether AccumulateGrad would only add in place, and nothing else sees the gradient before it.
  static bool can_accumulate(const at::Tensor& leaf, torch::autograd::AccumulateGrad& node) {
    const at::Tensor& sum = gradient_of(leaf);
    const auto* made = segment_of(sum);
    if (node.pre_hooks().size() != 1 || !node.post_hooks().empty()) return false;
    return made && is_operand(sum, leaf) && !c10::GradMode::is_enabled() && !node.tensor_post_acc_grad_hooks() &&
           sum.nbytes() <= made->domain()->cache->frame_limit() / 2;
  }

  /// Adds the last gradient of a step here, to use the sum while it is in memory. Backwards of other threads add
  /// under the node's mutex.
  static at::Tensor accumulate(StorageSegment& segment, const at::Tensor& leaf, const at::Tensor& gradient,
                               torch::autograd::AccumulateGrad& node) {
    c10::NoGradGuard no_grad;
    at::Tensor sum = gradient_of(leaf);
    std::unique_ptr<ForeseenNorm> norm;
    {
      const std::lock_guard lock(NodeMutex::of(node));
      const PinRequest request{segment_of(sum), Access::write};
      const TensorPin pin(request);
      c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
      const Booking kernels(Spent::operators);
      sum.add_(gradient);
      norm = take_expected_norm(segment, sum, sum.scalar_type());
    }
    foresee(sum, std::move(norm));
    early_update(segment, sum);
    return {};
  }

  static at::Tensor over_ranks(const at::Tensor& leaf, const at::Tensor& gradient) {
    if (gradient.layout() != c10::kStrided) {
      throw RankError("sparse gradients are not summed over ranks; make the layer with sparse=False");
    }
    if (gradient.requires_grad()) {
      throw RankError(
          "backward(create_graph=True) is not summed over ranks; take such gradients with torch.autograd.grad");
    }
    RowsToCome::settle(segment_of(gradient));
    StorageSegment& segment = *segment_of(leaf);
    const bool is_last = note_arrival(segment, /*was_deferred=*/false);
    Reducer& reducer = reducer_of(*segment.domain());
    if (const auto here = reducer.accumulate_here(leaf, gradient)) return *here;
    return reducer.reduce(leaf, gradient, is_last);
  }

  static void copy(const at::Tensor& to, const at::Tensor& gradient) {
    const Booking copies(Spent::copies);
    to.copy_(gradient);
  }

  static at::Tensor paged_copy(StorageSegment& segment, const at::Tensor& leaf, const at::Tensor& gradient) {
    c10::NoGradGuard no_grad;
    const auto dtype = segment.master().defined() ? gradient_dtype(leaf) : gradient.dtype();
    const bool narrow = dtype == at::kFloat && c10::isReducedFloatingType(gradient.scalar_type());
    at::Tensor paged = make_paged(segment.domain(), leaf.sizes(), leaf.strides(), narrow ? gradient.dtype() : dtype,
                                  Role::gradient, {.is_unset = true});
    auto& made = *segment_of(paged);
    std::unique_ptr<ForeseenNorm> norm;
    // In one frame if possible, since norms read it whole. A very large one goes page by page.
    if (made.bytes() <= made.cache()->frame_limit() / 2) {
      const PinRequest request{&made, Access::overwrite};
      const TensorPin pin(request);
      c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
      copy(paged, gradient);
      norm = take_expected_norm(segment, paged, narrow ? at::kFloat : paged.scalar_type());
    } else {
      copy(paged, gradient);
    }
    if (made.domain()->offloads_updates() && made.tier() != Tier::device) made.cache()->bring_down(made);
    at::Tensor result = narrow ? widened(paged) : paged;
    if (norm) foresee(result, std::move(norm));
    return result;
  }

  torch::autograd::AccumulateGrad* node_;  // owns this hook
  std::weak_ptr<Domain> domain_;           // in which its leaf was paged
};

}  // namespace

Reducer& reducer_of(const Domain& domain) { return *static_cast<Reducer*>(domain.reducer.get()); }

caffe2::TypeMeta gradient_dtype(const at::Tensor& leaf) {
  const auto* segment = segment_of(leaf);
  return segment && segment->master().defined() ? c10::scalarTypeToTypeMeta(segment->domain()->gradient_dtype)
                                                : leaf.dtype();
}

struct WidenedGradients::Widened {
  using Leaf = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  Leaf leaf;
  at::Tensor own, wide;
  std::int64_t version;             // of the wide one
  std::optional<ContentMark> mark;  // of its content; none: it has no pages
};

namespace {

std::optional<ContentMark> mark_of(const at::Tensor& tensor) {
  const auto* const segment = segment_of(tensor);
  return segment ? std::optional(segment->content_mark()) : std::nullopt;
}

/// In pages if possible: the update then widens in registers (rules/widened.h).
at::Tensor wide_copy(const StorageSegment& segment, const at::Tensor& leaf, const at::Tensor& gradient) {
  const bool fits =
      gradient.layout() == c10::kStrided && gradient.sizes() == leaf.sizes() && leaf.is_non_overlapping_and_dense();
  if (!fits || segment.domain()->partition.ranks) return gradient.to(at::kFloat);
  if (segment_of(gradient)) return is_operand(gradient, leaf) ? widened(gradient) : gradient.to(at::kFloat);
  if (!segment.domain()->pages(gradient.nbytes())) return gradient.to(at::kFloat);
  return widened(
      make_paged(segment.domain(), leaf.sizes(), leaf.strides(), gradient.dtype(), Role::gradient, {.is_unset = true})
          .copy_(gradient));
}

}  // namespace

WidenedGradients::WidenedGradients() = default;

// If it throws midway, the destructor of what the other constructor has made gives the first gradients back.
WidenedGradients::WidenedGradients(c10::ArrayRef<at::Tensor> leaves) : WidenedGradients() {
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& leaf : leaves) {
    const auto* const segment = segment_of(leaf);
    if (!segment || !segment->master().defined() || gradient_dtype(leaf) != at::kFloat) continue;
    const at::Tensor own = gradient_of(leaf);
    if (!own.defined() || own.requires_grad() || !c10::isReducedFloatingType(own.scalar_type())) continue;
    const at::Tensor wide = wide_copy(*segment, leaf, own);
    widened_.push_back({Widened::Leaf(leaf.getIntrusivePtr()), own, wide, version_of(wide), mark_of(wide)});
    set_gradient(leaf, wide);
  }
}

WidenedGradients::~WidenedGradients() {
  try {
    narrow();
  } catch (const std::exception&) {  // the step throws its own error
  }
}

void WidenedGradients::narrow() {
  const c10::NoGradGuard no_grad;
  auto narrowed = std::exchange(widened_, {});
  std::erase_if(narrowed, [](const Widened& gradient) {
    const auto alive = gradient.leaf.lock();
    const at::Tensor leaf = alive ? at::Tensor(alive) : at::Tensor();
    if (!leaf.defined() || !gradient_of(leaf).is_same(gradient.wide)) return true;
    set_gradient(leaf, gradient.own);
    return gradient.mark && gradient.mark == mark_of(gradient.wide) && gradient.version == version_of(gradient.wide);
  });
  for (const Widened& gradient : narrowed) at::Tensor(gradient.own).copy_(gradient.wide);
}

bool page_again(at::Tensor& leaf, const std::shared_ptr<Domain>& domain) {
  const std::uint64_t key = domain->leaves.key_of(leaf);
  if (key == 0 || !domain->partition.ranks) return false;
  const auto* before = segment_of(leaf);
  if (before && (before->domain() != domain || before->keeps_same())) return false;
  if (before) {
    make_same(leaf);
  } else if (!page_tensor(domain, leaf, Role::parameter, key)) {
    return false;
  }
  segment_of(leaf)->set_keeps_same(true);
  if (domain->mixes()) give_master(leaf, *domain);
  StorageSegment& segment = *segment_of(leaf);
  segment.leaf_known = true;
  domain->leaves.know(leaf);
  return true;
}

namespace {

/// The memory of a tensor that libtorch has read from an archive; null for any other.
FileMemory* archived(const at::Tensor& tensor) {
  if (FileMemory::alive() == 0 || !tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto& data =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &FileMemory::free ? static_cast<FileMemory*>(data.get_context()) : nullptr;
}

}  // namespace

bool page_data(const std::shared_ptr<Domain>& domain, at::Tensor& tensor, const at::Tensor& data, Role role,
               std::uint64_t number) {
  const bool may_copy = !data.defined() || domain->partition.ranks || archived(data);
  const bool shares = data.defined() && !domain->partition.ranks && (archived(data) || has_memory_of_torch(data)) &&
                      adopt_both(domain, tensor, data, role);
  if (!shares && !may_copy && domain->pages(tensor.nbytes())) {
    TORCH_WARN_ONCE(
        "a paged tensor now has memory that other tensors or the program share, so it is no longer paged; pass "
        "set_data() a copy to keep it in its budget");
    return false;
  }
  const bool was_paged = segment_of(tensor) && !shares;  // by take_data()
  if (!shares && !was_paged && !page_tensor(domain, tensor, role, number)) return false;
  if (FileMemory* const memory = archived(data)) memory->leave_memory();  // its content was copied
  if (was_paged) return true;
  StorageSegment& segment = *segment_of(tensor);
  if (role != Role::parameter || !tensor.is_leaf() || !tensor.requires_grad()) return true;
  segment.set_keeps_same(true);
  if (domain->mixes() && tensor.is_floating_point()) give_master(tensor, *domain);
  segment.leaf_known = true;
  domain->leaves.know(tensor);
  return true;
}

at::Tensor gradient_of(const at::Tensor& leaf) {
  const auto* const segment = segment_of(leaf);
  return segment && segment->outer() ? segment->outer()->gradient() : leaf.grad();
}

void set_gradient(const at::Tensor& leaf, const at::Tensor& gradient) {
  const auto* const segment = segment_of(leaf);
  if (segment && segment->outer()) return segment->outer()->set_gradient(gradient);
  leaf.mutable_grad() = gradient;
}

at::Tensor inner_gradient(const at::Tensor& leaf, const at::Tensor& gradient) {
  return PageGradient::paged(leaf, gradient, /*node=*/nullptr);
}

void forget_leaf(const at::Tensor& leaf) {
  if (auto* segment = segment_of(leaf); segment && std::exchange(segment->leaf_known, false)) {
    segment->domain()->leaves.forget(leaf);
  }
}

LeafHold hook_gradient(const at::Tensor& leaf) {
  // Several threads may meet one leaf at once; its node gets one hook.
  static std::mutex mutex;
  auto& segment = *segment_of(leaf);
  std::unique_lock lock(mutex);
  if (!std::exchange(segment.leaf_known, true)) {
    segment.domain()->leaves.know(leaf);
    if (!segment.is_own()) segment.set_keeps_same(true);
  }
  auto node = c10::GradMode::is_enabled() ? torch::autograd::impl::grad_accumulator(leaf)
                                          : torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (!node) return node;
  for (const auto& hook : node->pre_hooks()) {
    if (typeid(*hook) == typeid(PageGradient)) return node;
  }
  if (auto* accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get())) {
    node->add_pre_hook(std::make_unique<PageGradient>(accumulate, segment.domain()));
  }
  return node;
}

}  // namespace zeropage
