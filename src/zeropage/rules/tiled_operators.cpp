// Products with huge matrices, tile by tile, forward and backward. Neither the weight nor its gradient is ever whole
// in memory.
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <map>

#include "zeropage/base/errors.h"
#include "zeropage/rules/call.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/shared_casts.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {
namespace {

/// The tensor in the dtype that autocast would compute in, if it is on.
at::Tensor as_autocast(const at::Tensor& tensor) {
  const bool is_cast = tensor.is_floating_point() && tensor.scalar_type() != c10::kDouble;
  if (!autocasts(tensor) || !is_cast) return tensor;
  return cast_once(tensor);
}

/// The form in which tiles can walk through a matrix: by rows, or, transposed, by columns.
enum class Form : std::uint8_t { none, rows, columns };

Form form_of(const at::Tensor& weight) {
  if (weight.dim() != 2 || weight.numel() == 0 || weight.is_complex()) return Form::none;
  if (!is_tiled(weight) && !is_part(weight)) return Form::none;
  if (weight.is_contiguous()) return Form::rows;
  return weight.t().is_contiguous() ? Form::columns : Form::none;
}

/// Whether the operator accepts the dtypes: the same, or made the same by autocast.
bool is_alike(const at::Tensor& cast, const at::Tensor& x, const at::Tensor& weight) {
  return cast.scalar_type() == weight.scalar_type() || cast.scalar_type() != x.scalar_type() || autocasts(x);
}

/// Whether exact tiles would sum in another order, and there is room for the whole product: they multiply matrices,
/// and PyTorch sums a vector's product differently. Half of the memory is left for homes and for what else is in use.
/// Never over ranks, where one alone may have a single row.
bool is_sum_of_its_own(const Call& call, std::int64_t rows, std::int64_t outputs, const at::Tensor& weight) {
  const StorageSegment& segment = paged_segment(weight);
  if (segment.domain()->tiling != Tiling::exact || segment.domain()->partition.ranks) return false;
  if (rows != 1 && outputs != 1) return false;
  std::map<const StorageSegment*, std::size_t> operands;
  for (const PagedArgument& argument : call.paged) operands[argument.segment] = argument.tensor.storage().nbytes();
  std::size_t bytes = 0;
  for (const auto& [_, size] : operands) bytes += size;
  return bytes <= segment.frame_limit() / 2;
}
std::int64_t rows_of(const at::Tensor& x) {
  return x.dim() == 0 ? 1 : c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
}

/// Computes x [..., k] · weightᵀ if `transposed`, else x · weight, plus an optional bias of the outputs.
at::Tensor tiled_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool transposed) {
  const bool by_rows = form_of(weight) == Form::rows;
  const at::Tensor cast = as_autocast(x);
  TORCH_CHECK(is_alike(cast, x, weight), "expected mat1 and mat2 to have the same dtype, but got: ", x.scalar_type(),
              " != ", weight.scalar_type());
  auto sizes = x.sizes().vec();
  const std::int64_t inputs = weight.size(transposed ? 1 : 0), outputs = weight.size(transposed ? 0 : 1);
  TORCH_CHECK(x.dim() > 0 && sizes.back() == inputs, "mat1 and mat2 shapes cannot be multiplied (", x.sizes(),
              " and ", transposed ? weight.t().sizes() : weight.sizes(), ")");
  sizes.back() = outputs;
  const std::optional<at::Tensor> added = bias.defined() ? std::optional(as_autocast(bias)) : std::nullopt;
  const at::Tensor y = differentiable_product(cast.reshape({1, -1, inputs}), by_rows ? weight : weight.t(), added,
                                              by_rows == transposed, cast.scalar_type());
  return y.view(sizes);
}

}  // namespace

bool tile_linear(Call& call) {
  const at::Tensor x = call.argument(0).toTensor(), weight = call.argument(1).toTensor();
  const auto bias = call.argument(2).toOptional<at::Tensor>().value_or(at::Tensor());
  if (form_of(weight) == Form::none || !is_plain(x, weight) || !fits_in_memory(x)) return false;
  if (is_sum_of_its_own(call, rows_of(x), weight.size(0), weight)) return false;
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) return false;
  // PyTorch adds the bias inside the product if x is a matrix or can be viewed as one; else in a separate addition.
  const bool adds_inside = x.dim() == 2 || x.is_contiguous();
  const at::Tensor y = tiled_product(x, weight, adds_inside ? bias : at::Tensor(), /*transposed=*/true);
  call.return_value(adds_inside || !bias.defined() ? y : y.add(as_autocast(bias)));
  return true;
}

bool tile_mm(Call& call) {
  const at::Tensor x = call.argument(0).toTensor(), weight = call.argument(1).toTensor();
  if (!is_plain(x, weight) || x.dim() != 2 || weight.dim() != 2) return false;
  if (form_of(weight) != Form::none && fits_in_memory(x)) {
    if (is_sum_of_its_own(call, x.size(0), weight.size(1), weight)) return false;
    call.return_value(tiled_product(x, weight, {}, /*transposed=*/false));
    return true;
  }
  if (form_of(x) == Form::none || !fits_in_memory(weight)) return false;
  if (is_sum_of_its_own(call, weight.size(1), x.size(0), x)) return false;
  call.return_value(tiled_product(weight.t(), x, {}, /*transposed=*/true).t().contiguous());
  return true;
}

bool tile_addmm(Call& call) {
  const at::Tensor bias = call.argument(0).toTensor(), x = call.argument(1).toTensor();
  const at::Tensor weight = call.argument(2).toTensor();
  if (form_of(weight) == Form::none || !is_plain(x, weight) || x.dim() != 2 || !fits_in_memory(x)) return false;
  if (is_sum_of_its_own(call, x.size(0), weight.size(1), weight)) return false;
  const bool plain = call.argument(3).toScalar().equal(1) && call.argument(4).toScalar().equal(1);
  if (!plain || bias.dim() != 1 || bias.size(0) != weight.size(1)) return false;
  call.return_value(tiled_product(x, weight, bias, /*transposed=*/false));
  return true;
}

bool tile_bmm(Call& call) {
  const at::Tensor x = call.argument(0).toTensor(), weight = call.argument(1).toTensor();
  if (!(is_tiled(weight) || is_part(weight)) || weight.numel() == 0 || weight.is_complex() || !is_plain(x, weight) ||
      x.dim() != 3 || weight.dim() != 3 || !fits_in_memory(x)) {
    return false;
  }
  const bool fits = x.size(0) == weight.size(0) && x.size(2) == weight.size(1);
  const bool by_rows = weight.is_contiguous();
  const at::Tensor cast = as_autocast(x);
  if (!is_alike(cast, x, weight) || is_sum_of_its_own(call, x.size(1), weight.size(2), weight)) return false;
  if (!fits || !(by_rows || weight.transpose(1, 2).is_contiguous())) return false;
  call.return_value(differentiable_product(cast, by_rows ? weight : weight.transpose(1, 2), std::nullopt, !by_rows,
                                           cast.scalar_type()));
  return true;
}

bool tile_parts(Call& call) {
  // Under autocast, inner operators on a tensor that fits could use other dtypes than the whole operator.
  const bool any = std::any_of(call.paged.begin(), call.paged.end(), [&](const PagedArgument& a) {
    return is_tiled(a.tensor) || (is_part(a.tensor) && !autocasts(a.tensor));
  });
  if (!any || !Call::plain_modes()) return false;
  call.op.redispatchBoxed(call.below - c10::autocast_dispatch_keyset, &call.stack);  // its parts reach the fallback
  return true;
}

}  // namespace zeropage
