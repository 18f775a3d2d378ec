// Operators on small parts of tensors that are larger than memory: they run on copies of the parts.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/rules/call.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/stand_ins.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {
namespace {

/// Whether the tensor's segment can never be whole in memory.
bool is_of_huge(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  if (segment && segment->domain()->partition.ranks) return false;  // ranks may use other parts
  return segment && is_tiled(tensor) && segment->bytes() > segment->frame_limit() && tensor.numel() > 0;
}

/// Whether an operator can use a copy of this view of a huge segment. The view must be small. If the operator writes
/// it, it must have no gaps, because another argument could hold the elements in them.
bool takes_copy(const at::Tensor& tensor, bool writes) {
  if (!is_of_huge(tensor)) return false;
  const std::size_t span = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  return span <= segment_of(tensor)->frame_limit() / 2 && (!writes || span == tensor.nbytes());
}

/// Runs a view in place, such as t_(), which needs no data. Resizing does.
bool run_view_in_place(Call& call) {
  if (!call.op.hasTag(at::Tag::inplace_view) || call.name().find("resize") != std::string::npos) return false;
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  call.redispatch();
  return true;
}

/// Makes a copy that autograd records.
class RecordedCopy : public torch::autograd::Function<RecordedCopy> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& part) {
    context->set_materialize_grads(false);
    return copy_of_part(part);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return gradients;
  }
};

/// Throws PyTorch's error of pointwise operators that write memory which they also read, as another view. Copies of
/// the two would hide it.
void refuse_partial_overlap(const Call& call) {
  if (!call.op.hasTag(at::Tag::pointwise) && call.op.schema().name() != "aten::copy_") return;
  const auto begin_of = [](const at::Tensor& t) { return t.storage_offset() * t.itemsize(); };
  const auto is_dense = [](const at::Tensor& t) { return t.unsafeGetTensorImpl()->is_non_overlapping_and_dense(); };
  for (const PagedArgument& written : call.paged) {
    if (written.access == Access::read || !is_dense(written.tensor)) continue;
    for (const PagedArgument& other : call.paged) {
      const at::Tensor &a = written.tensor, &b = other.tensor;
      if (other.segment != written.segment || a.is_same(b) || !is_dense(b)) continue;
      const auto a_begin = begin_of(a), b_begin = begin_of(b);
      const auto a_end = a_begin + static_cast<std::int64_t>(a.nbytes());
      const auto b_end = b_begin + static_cast<std::int64_t>(b.nbytes());
      const bool is_full = a_begin == b_begin && a_end == b_end && a.strides() == b.strides();
      TORCH_CHECK(is_full || a_begin >= b_end || b_begin >= a_end,
                  "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
                  "single memory location. Please clone() the tensor before performing the operation.");
    }
  }
}

/// Copies back, or throws if the operator resized the copy: it cannot resize the tensor.
void copy_back_same_size(const at::Tensor& tensor, const at::Tensor& copy) {
  if (copy.sizes() != tensor.sizes() || copy.strides() != tensor.strides()) {
    throw AccessError(
        "a paged tensor keeps the size it was made with, but this operator would change it; give out= a tensor of "
        "the result's shape, or use an ordinary tensor");
  }
  copy_back(copy, tensor);
}

}  // namespace

bool run_on_copies(Call& call) {
  if (!Call::plain_modes()) return false;
  const bool is_recorded = call.needs_autograd();
  bool any = false;
  for (const PagedArgument& argument : call.paged) {
    if (!is_of_huge(argument.tensor)) continue;
    if (is_recorded && (argument.access != Access::read || has_tangent(argument.tensor))) return false;
    if (run_view_in_place(call)) return true;
    if (call.op.hasTag(at::Tag::inplace_view) || !takes_copy(argument.tensor, argument.access != Access::read)) {
      return false;
    }
    any = true;
  }
  if (!any) return false;
  refuse_partial_overlap(call);
  StandIns copies(call, is_recorded ? StandIns::Per::recorded_part : StandIns::Per::part);
  copies.replace(&takes_copy, [&](const at::Tensor& tensor) {
    return is_recorded ? RecordedCopy::apply(tensor) : copy_of_part(tensor);
  });
  const auto run = [&] { return call.op.callBoxed(&call.stack), true; };
  return copies.run(run, &copy_back_same_size, [](const at::Tensor&, const at::Tensor&) { return false; });
}

}  // namespace zeropage
