// cat and stack of paged tensors that do not fit in memory at once. They copy one tensor after another into the
// result, an ordinary tensor, like the result for tensors that fit.
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "zeropage/base/booked_time.h"
#include "zeropage/rules/rules.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {
namespace {

/// Makes the result without content. Throws PyTorch's errors.
at::Tensor make_result(Call& call, const std::vector<at::Tensor>& tensors) {
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  std::vector<at::Tensor> shapes;
  for (const at::Tensor& tensor : tensors) {
    shapes.push_back(
        at::empty_strided(tensor.sizes(), tensor.strides(), at::device(c10::kMeta).dtype(tensor.dtype())));
  }
  torch::jit::Stack stack{shapes, call.argument(1)};
  call.op.callBoxed(stack);
  const at::Tensor shape = stack[0].toTensor();
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(tensors[0].device()));
}

/// Whether the operator would hold more at once than the budget allows, and copies can avoid it.
bool is_by_tensors(Call& call) {
  const StorageSegment& segment = *call.paged[0].segment;
  if (call.needs_autograd() || !Call::plain_modes() || scope_domain() || segment.domain()->planned_on) return false;
  std::size_t bytes = 0;
  for (const PagedArgument& argument : call.paged) bytes += argument.tensor.nbytes();
  return bytes > segment.frame_limit();
}

/// Whether copies give the operator's result.
bool is_copies(Call& call, const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors[0];
  const bool mixes = call.paged[0].segment->domain()->mixes();
  return !autocasts(call.op, first.device().type()) && std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
    // With different dtypes, copying a mixed-precision parameter would copy its master.
    const bool is_seen = !mixes || tensor.dtype() == first.dtype();
    return tensor.layout() == c10::kStrided && tensor.device() == first.device() && is_seen;
  });
}

}  // namespace

bool join_parts(Call& call) {
  if (!is_by_tensors(call)) return false;
  const Booking kernel(Spent::operators);
  call.op.redispatchBoxed(call.below, &call.stack);
  return true;
}

bool join_one_by_one(Call& call) {
  // cat(Tensor[] tensors, int dim=0), stack(Tensor[] tensors, int dim=0)
  const std::vector<at::Tensor> tensors = call.argument(0).toTensorVector();
  if (!is_by_tensors(call) || !is_copies(call, tensors)) return false;
  const bool stacks = call.name() == "aten::stack";
  const at::Tensor result = make_result(call, tensors);
  const std::int64_t dim = c10::maybe_wrap_dim(call.argument(1).toInt(), result.dim());
  std::int64_t end = 0;
  for (const at::Tensor& tensor : tensors) {
    if (stacks) {
      result.select(dim, end++).copy_(tensor);
    } else if (tensor.dim() == result.dim()) {  // otherwise it is empty, which cat allows
      result.narrow(dim, end, tensor.size(dim)).copy_(tensor);
      end += tensor.size(dim);
    }
  }
  call.return_value(result);
  return true;
}

}  // namespace zeropage
