// Norms of a whole tensor. Where the tensor fits the device's budget it is brought in, and the bits are PyTorch's;
// where it does not, each page's norm is taken and the norms are combined in double precision.
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>
#include <mutex>

#include "zeropage/rules/rules.h"
#include "zeropage/rules/windows.h"

namespace zeropage {

bool run_norm(Call& call) {
  // linalg_vector_norm(self, ord, dim, keepdim, dtype)
  const at::Tensor self = call.argument(0).toTensor();
  const auto* segment = segment_of(self);
  if (!segment || segment->bytes() <= segment->pager()->frame_limit() || call.needs_autograd()) return false;
  if (!call.argument(2).isNone() || call.argument(3).toBool() || !is_operand(self, self)) return false;
  const double ord = call.argument(1).toScalar().toDouble();
  const auto dtype = call.argument(4).toOptional<c10::ScalarType>();

  double total = ord == -INFINITY ? INFINITY : 0;
  std::mutex mutex;
  for_each_window(
      {Operand{self, segment_of(self), Access::read}}, Chunking::iterator, [&](c10::ArrayRef<at::Tensor> s) {
        const double part = at::linalg_vector_norm(s[0], ord, std::nullopt, false, c10::kDouble).item<double>();
        std::lock_guard lock(mutex);
        if (ord == INFINITY)
          total = std::isnan(part) ? part : std::max(total, part);
        else if (ord == -INFINITY)
          total = std::isnan(part) ? part : std::min(total, part);
        else if (ord == 0)
          total += part;
        else
          total += std::pow(part, ord);
      });
  if (std::isfinite(ord) && ord != 0) total = std::pow(total, 1 / ord);
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
  call.return_value(at::scalar_tensor(total, self.options().dtype(dtype.value_or(self.scalar_type()))));
  return true;
}

}  // namespace zeropage
