// Reductions of huge tensors, page by page, if their result does not depend on the order of elements: extremes, any,
// all, counts, sums of integers, equality. Sums of floats are not included, because another order rounds differently.
// If a maximum or minimum is zero and there are zeros of both signs, the sign may differ from PyTorch's. Its kernels
// return the last zero in the last of their vector lanes. The order of lanes depends on the dtype, the processor and
// the number of threads.
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <atomic>
#include <mutex>

#include "zeropage/rules/rules.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

bool is_by_pages(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  return segment && !segment->domain()->partition.ranks && !segment->domain()->planned_on && tensor.dim() > 0 &&
         is_operand(tensor, tensor) && tensor.nbytes() > segment->frame_limit();
}

/// Whether the call reduces all dimensions, and its result does not depend on an order.
bool is_of_all(Call& call) {
  const at::Tensor self = call.argument(0).toTensor();
  if (call.name() != "aten::sum") return call.arguments == 1 || call.argument(1).isNone();
  return c10::isIntegralType(self.scalar_type(), /*includeBool=*/true) && call.argument(1).isNone();
}

}  // namespace

bool tile_reduction(Call& call) {
  // any, all, max, min (self); count_nonzero(self, dim=None); sum(self, dtype=None)
  const at::Tensor self = call.argument(0).toTensor();
  if (!Call::plain_modes() || call.needs_autograd() || !is_by_pages(self) || !is_of_all(call)) return false;
  std::vector<at::Tensor> parts;
  std::mutex mutex;
  for_each_window({Operand{self, segment_of(self), Access::read}}, Chunking::iterator,
                  [&](c10::ArrayRef<at::Tensor> slices) {
                    torch::jit::Stack stack{slices[0]};
                    for (std::size_t i = 1; i < call.arguments; ++i) stack.push_back(call.argument(i));
                    call_below(call.op, stack);
                    const std::lock_guard lock(mutex);
                    parts.push_back(stack[0].toTensor());
                  });
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const at::Tensor all = at::stack(parts);
  if (call.name() == "aten::count_nonzero" || call.name() == "aten::sum") {
    call.return_value(all.sum());
    return true;
  }
  torch::jit::Stack stack{all};
  call_below(call.op, stack);
  call.return_value(std::move(stack[0]));
  return true;
}

bool tile_equal(Call& call) {
  const at::Tensor self = call.argument(0).toTensor(), other = call.argument(1).toTensor();
  if (!Call::plain_modes() || !(is_by_pages(self) || is_by_pages(other))) return false;
  if (self.dtype() != other.dtype() || !is_operand(self, self) || !is_operand(other, self)) return false;
  std::atomic<bool> are_equal = true;
  const Operand operands[] = {{self, segment_of(self), Access::read}, {other, segment_of(other), Access::read}};
  for_each_window(operands, Chunking::iterator, [&](c10::ArrayRef<at::Tensor> slices) {
    if (are_equal && !slices[0].equal(slices[1])) are_equal = false;
  });
  call.return_value(are_equal.load());
  return true;
}

}  // namespace zeropage
