#include "zeropage/train/local_sums.h"

#include "zeropage/base/errors.h"
#include "zeropage/base/no_paging_guard.h"
#include "zeropage/rules/windows.h"
#include "zeropage/train/gradients.h"

namespace zeropage {

at::Tensor LocalSums::begin(const at::Tensor& leaf, const at::Tensor& gradient) {
  c10::NoGradGuard no_grad;
  const std::shared_ptr<Domain> domain = segment_of(leaf)->domain();
  at::Tensor sum;
  try {
    sum = make_own_gradient(domain, leaf.sizes(), leaf.strides(), gradient_dtype(leaf), /*is_unset=*/true);
  } catch (const BudgetError& error) {
    throw BudgetError(std::string(error.what()) +
                      "; under no_sync() each rank keeps whole gradients: let them go to the disk with "
                      "gradients=\"auto\", or leave no_sync() out");
  }
  sum.copy_(gradient);
  segment_of(sum)->is_local_sum = true;
  std::lock_guard lock(mutex_);
  keys_.insert(domain->leaves.know(leaf));
  return sum;
}

bool LocalSums::holds(const at::Tensor& leaf) const {
  const at::Tensor gradient = gradient_of(leaf);
  const auto* const sum = gradient.defined() ? segment_of(gradient) : nullptr;
  return sum && sum->is_local_sum && segment_of(leaf) && is_whole(gradient);
}

at::Tensor LocalSums::take(const at::Tensor& leaf) {
  if (!holds(leaf)) return {};
  std::lock_guard lock(mutex_);
  keys_.erase(segment_of(leaf)->domain()->leaves.key_of(leaf));
  at::Tensor sum = gradient_of(leaf);
  set_gradient(leaf, {});
  return sum;
}

void LocalSums::give_back(const at::Tensor& leaf, const at::Tensor& sum) {
  if (gradient_of(leaf).defined() || !segment_of(leaf)) return;
  set_gradient(leaf, sum);
  std::lock_guard lock(mutex_);
  keys_.insert(segment_of(leaf)->domain()->leaves.know(leaf));
}

std::vector<std::uint64_t> LocalSums::keys() const {
  std::lock_guard lock(mutex_);
  return {keys_.begin(), keys_.end()};
}

void add_local_sum(const at::Tensor& gradient, const at::Tensor& sum) {
  c10::NoGradGuard no_grad;
  if (!lies_like(sum, gradient)) {  // `.data =` has given the leaf other strides
    const PagingAgain paging;
    gradient.add_(sum);
    return;
  }
  const Operand operands[] = {{gradient, segment_of(gradient), Access::write}, {sum, segment_of(sum), Access::read}};
  for_each_window(operands, Chunking::iterator, [](c10::ArrayRef<at::Tensor> slices) { slices[0].add_(slices[1]); });
}

}  // namespace zeropage
