// Pointwise operators on whole paged tensors. They run page by page, in place or into a new paged tensor of the same
// role.
#include "zeropage/rules/pointwise.h"

#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <unordered_map>

#include "zeropage/rules/placement.h"
#include "zeropage/rules/probe.h"
#include "zeropage/rules/program.h"
#include "zeropage/rules/rules.h"

namespace zeropage {
namespace {

/// Whether it divides integers, which fails if the divisor contains zero.
bool may_fail_by_content(const c10::OperatorHandle& op, const Substitution& call) {
  std::string_view name = op.schema().name();
  name.remove_prefix(std::min(name.find("::") + 2, name.size()));
  if (name.substr(0, 9) == "_foreach_") name.remove_prefix(9);
  for (const std::string_view divides : {"div", "floor_divide", "remainder", "fmod", "gcd", "lcm"}) {
    if (name.substr(0, divides.size()) != divides) continue;
    return std::any_of(call.operands.begin(), call.operands.end(),
                       [](const Operand& o) { return c10::isIntegralType(o.tensor.scalar_type(), true); });
  }
  return false;
}

/// Whether a scalar is a meta tensor and the operands are not. PyTorch then runs the kernel that writes nothing.
bool has_meta_scalar(const Substitution& call) {
  if (call.operands.front().tensor.is_meta()) return false;
  return std::any_of(call.arguments.begin(), call.arguments.end(), [](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined() && value.toTensor().is_meta();
  });
}

/// Defers the call if all its operands are paged. Throws the call's own errors now.
std::optional<at::Tensor> run_later(const c10::OperatorHandle& op, const Substitution& call, int written,
                                    Chunking chunking) {
  for (const Operand& operand : call.operands) {
    if (!operand.segment) return std::nullopt;
  }
  if (may_fail_by_content(op, call) || has_meta_scalar(call)) return std::nullopt;
  const caffe2::TypeMeta dtype = probe(op, call);
  auto result = defer(op, call, chunking, written < 0 ? std::optional(dtype) : std::nullopt);
  if (result && written >= 0) result = call.operands[written].tensor;
  return result;
}

}  // namespace

at::Tensor run_pointwise_windows(const c10::OperatorHandle& op, const Substitution& call, int written,
                                 Chunking chunking, Placement placement) {
  // A deferred call also needs its scalars' values and its dtype now.
  TensorPin scalars(call.scalars);
  if (written < 0) {
    for (const Operand& operand : call.operands) {
      if (operand.segment) refresh_outside_steps(*operand.segment);
    }
  }
  if (placement == Placement::same) {
    if (auto result = run_later(op, call, written, chunking)) return *result;
  }
  if (written >= 0) {
    for_each_window(call.operands, chunking, [&](c10::ArrayRef<at::Tensor> slices) {
      auto stack = call.stack(slices);
      call_below(op, stack);
    });
    return call.operands[written].tensor;
  }
  const caffe2::TypeMeta dtype = probe(op, call);
  const auto like = std::find_if(call.operands.begin(), call.operands.end(), [](auto& o) { return o.segment; });
  at::Tensor result = make_paged(
      like->segment->domain(), like->tensor.sizes(), strides_of_result(like->tensor), dtype, like->segment->role(),
      {.layout = like->segment->layout(), .like = like->segment, .placement = placement, .is_unset = true});
  c10::SmallVector<Operand, 8> operands(call.operands.begin(), call.operands.end());
  operands.push_back({result, segment_of(result), Access::overwrite});
  for_each_window(operands, chunking, [&](c10::ArrayRef<at::Tensor> slices) {
    auto stack = call.stack(slices.slice(0, slices.size() - 1));
    call_below(op, stack);
    slices.back().copy_(stack[0].isTensor() ? stack[0].toTensor() : stack[0].toTensorVector()[0]);
  });
  return result;
}

namespace {

/// The shape that all operands must have. A paged tensor of no dimension is a scalar among others.
const at::Tensor& shape_of(const Call& call) {
  const auto with_dimensions = [](const PagedArgument& argument) { return argument.tensor.dim() > 0; };
  const auto first = std::find_if(call.paged.begin(), call.paged.end(), with_dimensions);
  return first == call.paged.end() ? call.paged[0].tensor : first->tensor;
}

/// Runs sum += part for a gradient whose reduction is under way. No thread waits: the reducer adds it on arrival.
bool add_when_it_comes(Call& call) {
  if (call.name() != "aten::add_" || call.arguments != 3 || call.paged.size() != 2) return false;
  const auto& [sum, into, _] = call.paged[0];
  const auto& [part, from, __] = call.paged[1];
  const auto coming = from->pending();
  if (!coming || into == from || sum.sizes() != part.sizes() || sum.strides() != part.strides()) return false;
  if (sum.dtype() != part.dtype() || !is_whole(sum) || !is_whole(part)) return false;
  const auto alpha = call.argument(2).toScalar();
  return alpha.isIntegral(true) && alpha.toLong() == 1 && coming->add_to(*into, *from);
}

/// Whether it is a sum of gradients that autograd would add in place, because only it holds `sum`. Autograd does not
/// if a mode is set, for example in a planned run.
bool adds_in_place_unless_planned(Call& call) {
  if (call.name() != "aten::add" || call.arguments != 3 || call.paged.size() != 2) return false;
  const auto& [sum, into, _] = call.paged[0];
  const auto& [part, from, __] = call.paged[1];
  constexpr std::size_t kOurs = 2;  // references of ours: on the stack, and in `paged`
  return into->domain()->planned_on && into->role() == Role::gradient && from->role() == Role::gradient &&
         into != from && sum.sizes() == part.sizes() && sum.use_count() == kOurs + 1;
}

}  // namespace

bool run_pointwise(Call& call) {
  const auto& schema = call.op.schema();
  if (call.needs_autograd() || !Call::plain_modes() || schema.returns().size() != 1) return false;
  if (adds_in_place_unless_planned(call)) {
    const at::Tensor sum = call.paged[0].tensor;
    call.return_value(sum.add_(call.paged[1].tensor, call.argument(2).toScalar()));
    return true;
  }
  if (add_when_it_comes(call) || add_nonzero(call)) {
    at::Tensor sum = call.paged[0].tensor;
    bump_version(sum);
    call.return_value(std::move(sum));
    return true;
  }
  const at::Tensor& shape = shape_of(call);
  Substitution substitution;
  int written = -1;
  for (std::size_t i = 0; i < call.arguments; ++i) {
    if (call.argument(i).isTensorList()) return false;
    if (call.info.writes[i]) written = static_cast<int>(substitution.operands.size());
    if (!substitution.add(call.argument(i), false, shape, call.info.writes[i] ? Access::write : Access::read))
      return false;
    if (call.info.writes[i] && substitution.operand_of.back() < 0) return false;
  }
  // If all inputs are scalars, `out=` does not have the result's shape: PyTorch resizes it, or throws.
  if (written >= 0 && !call.info.writes[0] && substitution.operands.size() == 1) return false;
  if (!substitution.has_paged_operand() || substitution.writes_its_scalars()) return false;
  const bool over_ranks = call.paged[0].segment->domain()->partition.ranks != nullptr;
  const Placement placement = over_ranks && written < 0 ? placement_of(call) : Placement::same;
  at::Tensor result = run_pointwise_windows(call.op, substitution, written, Chunking::iterator, placement);
  if (written >= 0) bump_version(result);
  call.return_value(std::move(result));
  return true;
}

}  // namespace zeropage
