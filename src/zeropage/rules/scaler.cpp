// torch.amp.GradScaler's operator on gradients: multiplies them by 1 / scale, page by page, and searches for
// infinities and NaNs. Each rank searches its share; a find of one rank counts on all.
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>

#include "zeropage/rules/rules.h"
#include "zeropage/rules/windows.h"

namespace zeropage {

bool run_unscale(Call& call) {
  // _amp_foreach_non_finite_check_and_unscale_(Tensor(a!)[] self, Tensor(b!) found_inf, Tensor inv_scale)
  if (call.needs_autograd() || !Call::plain_modes()) return false;
  at::Tensor found = call.argument(1).toTensor();
  const at::Tensor inv_scale = call.argument(2).toTensor();
  if (segment_of(found) || segment_of(inv_scale)) return false;
  const auto gradients = call.argument(0).toTensorVector();
  for (const at::Tensor& gradient : gradients) {
    if (gradient.dim() > 0 && segment_of(gradient) && !is_operand(gradient, gradient)) return false;
  }
  std::mutex mutex;
  const auto unscale = [&](at::Tensor part) {
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
    at::Tensor here = at::zeros_like(found);
    torch::jit::Stack stack{c10::List<at::Tensor>({part}), here, inv_scale};
    call_below(call.op, stack);
    std::lock_guard lock(mutex);
    found.copy_(at::maximum(found, here));
  };
  std::shared_ptr<Collectives> ranks;
  for (const at::Tensor& gradient : gradients) {
    auto* segment = segment_of(gradient);
    if (segment) segment->complete();  // before that, it is unknown whether this rank holds its share alone
    if (segment && (holds_share_only(segment) || segment->is_own())) ranks = segment->domain()->partition.ranks;
    if (segment && gradient.dim() > 0) {
      for_each_window(Operand{gradient, segment, Access::write}, Chunking::iterator,
                      [&](c10::ArrayRef<at::Tensor> slices) { unscale(slices[0]); });
    } else {
      const PinRequest request{segment, Access::write};
      TensorPin pin(segment ? c10::ArrayRef<PinRequest>(request) : c10::ArrayRef<PinRequest>());
      unscale(gradient);
      pin.release();
    }
    bump_version(gradient);
  }
  if (ranks) {
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
    found.copy_(ranks->all_gather_small(found, {"found_inf", 0, 0}).amax().view_as(found));
  }
  call.return_nothing();
  return true;
}

}  // namespace zeropage
