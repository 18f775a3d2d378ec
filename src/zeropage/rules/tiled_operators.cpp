// Operators that take a huge operand tile by tile, forward and backward: products with matrices, and embeddings.
// Neither the weight nor its gradient is ever whole in memory.
//
// [Note: order of summation] Where rows of the weight are outputs (linear's forward, the weight's gradient,
// embeddings), each result is computed as without tiles. Where a sum goes over the rows (linear's gradient of the
// input), tiling = "auto" adds what each tile gives; "exact" takes a block of columns of all rows at a time, which
// reads the weight once a block.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/tiles.h"

namespace zeropage {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Operators inside compute on what is there: ordinary tensors, in the dtypes they have.
struct Computing {
  c10::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

void refuse_graph_of_gradient() {
  if (!c10::GradMode::is_enabled()) return;
  throw Error(
      "a second derivative by a weight that is taken in tiles is not computed; raise device_memory or tile_above so "
      "that it is taken whole, or use create_graph=False");
}

/// Autograd calls backward, and knows nothing of our errors.
template <class Run>
variable_list translated(Run run) {
  try {
    return run();
  } catch (const Error& error) {
    throw_translated(error, "backward of an operator in tiles");
  }
}

/// The gradient of a paged tensor, to be filled.
at::Tensor gradient_like(const at::Tensor& weight) {
  return make_paged(segment_of(weight)->domain(), weight.sizes(), weight.strides(), weight.dtype(), Role::gradient);
}

/// y [t, rows] = x [t, columns] · rowsᵀ + bias.
at::Tensor rows_as_outputs(const at::Tensor& x, const Rows& weight, const at::Tensor& bias) {
  at::Tensor y = at::empty({x.size(0), weight.rows}, x.options());
  for_each_tile(weight, Access::read, [&](std::int64_t row, const at::Tensor& tile) {
    const std::int64_t n = tile.size(0);
    const at::Tensor part = tile.to(x.scalar_type());
    y.narrow(1, row, n).copy_(bias.defined() ? at::addmm(bias.narrow(0, row, n), x, part.t()) : at::mm(x, part.t()));
  });
  return y;
}

/// y [t, columns] = x [t, rows] · rows, as a sum of what each tile gives.
at::Tensor rows_summed(const at::Tensor& x, const Rows& weight) {
  const bool narrow = c10::isReducedFloatingType(x.scalar_type());
  at::Tensor y = at::zeros({x.size(0), weight.columns}, narrow ? x.options().dtype(c10::kFloat) : x.options());
  for_each_tile(weight, Access::read, [&](std::int64_t row, const at::Tensor& tile) {
    const at::Tensor of_rows = x.narrow(1, row, tile.size(0));
    narrow ? y.add_(at::mm(of_rows, tile.to(x.scalar_type()))) : y.addmm_(of_rows, tile.to(x.scalar_type()));
  });
  return y.to(x.scalar_type());
}

/// The same, some columns of all rows at a time.
at::Tensor rows_summed_exactly(const at::Tensor& x, const Rows& weight) {
  const auto& domain = weight.segment->domain();
  const std::size_t column_bytes = weight.rows * x.itemsize();
  const std::int64_t fitting = round_down(domain->tile_above / 2 / column_bytes, kFewestColumns);
  const std::int64_t block = std::min(std::max(fitting, kFewestColumns), weight.columns);
  const at::Tensor paged = make_paged(domain, {weight.rows, block}, {block, 1}, x.dtype(), Role::activation,
                                      {.alone = true, .is_local = true});
  const PinRequest request{segment_of(paged), Access::overwrite};
  const TensorPin pin(request);
  const at::Tensor columns =
      at::from_blob(paged.storage().mutable_data(), paged.sizes(), [](void*) {}, x.options(), x.device());
  at::Tensor y = at::empty({x.size(0), weight.columns}, x.options());
  for (std::int64_t begin = 0; begin < weight.columns;) {
    std::int64_t n = std::min(block, weight.columns - begin);
    const std::int64_t left = weight.columns - begin - n;
    if (left > 0 && left < kFewestColumns && n > kFewestColumns) n -= kFewestColumns;
    for_each_tile(weight, Access::read, [&](std::int64_t row, const at::Tensor& tile) {
      columns.narrow(0, row, tile.size(0)).narrow(1, 0, n).copy_(tile.narrow(1, begin, n));
    });
    y.narrow(1, begin, n).copy_(at::mm(x, columns.narrow(1, 0, n)));
    begin += n;
  }
  return y;
}

/// x [b, t, k] with the b-th part of the weight, which is [b, rows, columns].
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool rows_are_outputs) {
  const Rows all(weight);
  const std::int64_t parts = x.size(0);
  const bool exact = all.segment->domain()->tiling == Tiling::exact;
  const auto product_of = [&](std::int64_t i) {
    const Rows part = all.part(i, parts);
    if (rows_are_outputs) return rows_as_outputs(x[i], part, bias);
    at::Tensor y = exact ? rows_summed_exactly(x[i], part) : rows_summed(x[i], part);
    return bias.defined() ? y.add_(bias) : y;
  };
  if (parts == 1) return product_of(0).unsqueeze(0);
  at::Tensor y;
  for (std::int64_t i = 0; i < parts; ++i) {
    const at::Tensor one = product_of(i);
    if (!y.defined()) y = at::empty({parts, one.size(0), one.size(1)}, x.options());
    y[i].copy_(one);
  }
  return y;
}

/// The weight's gradient: of each tile, left [b, t, rows]ᵀ · right [b, t, columns].
at::Tensor outer(const at::Tensor& left, const at::Tensor& right, const at::Tensor& weight) {
  at::Tensor gradient = gradient_like(weight);
  const Rows all(gradient);
  for (std::int64_t i = 0; i < left.size(0); ++i) {
    for_each_tile(all.part(i, left.size(0)), Access::overwrite, [&](std::int64_t row, const at::Tensor& tile) {
      at::Tensor out = tile;
      const at::Tensor of_rows = left[i].narrow(1, row, tile.size(0)).t();
      if (out.scalar_type() == left.scalar_type()) {
        at::mm_out(out, of_rows, right[i]);
      } else {
        out.copy_(at::mm(of_rows, right[i]));
      }
    });
  }
  return gradient;
}

/// x [b, t, k], weight [b, rows, columns] or, of one, [rows, columns], contiguous and paged. Returns [b, t, outputs].
class TiledProduct : public torch::autograd::Function<TiledProduct> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, bool rows_are_outputs) {
    context->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight});
    context->saved_data["rows_are_outputs"] = rows_are_outputs;
    context->saved_data["bias"] = bias.has_value() && bias->defined();
    const Computing computing;
    return product(x, weight, bias.value_or(at::Tensor()), rows_are_outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return translated([&] { return backward_of(context, gradients); });
  }

 private:
  static variable_list backward_of(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], gradient = gradients[0].contiguous();
    const bool rows_are_outputs = context->saved_data["rows_are_outputs"].toBool();
    variable_list result(4);
    if (context->needs_input_grad(0)) result[0] = apply(gradient, weight, std::nullopt, !rows_are_outputs);
    if (context->needs_input_grad(1)) {
      refuse_graph_of_gradient();
      const Computing computing;
      result[1] = rows_are_outputs ? outer(gradient, x, weight) : outer(x, gradient, weight);
    }
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) result[2] = gradient[0].sum(0);
    return result;
  }
};

class TiledEmbedding : public torch::autograd::Function<TiledEmbedding> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices,
                            std::int64_t padding, bool by_frequency) {
    context->save_for_backward({weight, indices});
    context->saved_data["padding"] = padding;
    context->saved_data["by_frequency"] = by_frequency;
    const Computing computing;
    const at::Tensor flat = indices.reshape(-1);
    check(flat, weight);
    at::Tensor rows = at::empty({flat.numel(), weight.size(1)}, weight.options().requires_grad(false));
    for_each_used(weight, flat, Access::read,
                  [&](std::int64_t row, const at::Tensor& tile, const at::Tensor& places) {
                    rows.index_copy_(0, places, tile.index_select(0, flat.index_select(0, places) - row));
                  });
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    return rows.view(sizes);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return translated([&] { return backward_of(context, gradients); });
  }

 private:
  static variable_list backward_of(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &weight = saved[0], &indices = saved[1];
    refuse_graph_of_gradient();
    const Computing computing;
    const at::Tensor flat = indices.reshape(-1);
    const at::Tensor rows = gradients[0].reshape({flat.numel(), weight.size(1)});
    const std::int64_t padding = context->saved_data["padding"].toInt();
    at::Tensor gradient = gradient_like(weight);  // zeros, of which those that are not used stay so
    for_each_used(gradient, flat, Access::write, [&](std::int64_t row, at::Tensor tile, const at::Tensor& places) {
      const at::Tensor own = flat.index_select(0, places) - row;
      const std::int64_t own_padding = padding >= row && padding < row + tile.size(0) ? padding - row : -1;
      tile.copy_(at::embedding_dense_backward(rows.index_select(0, places), own, tile.size(0), own_padding,
                                              context->saved_data["by_frequency"].toBool()));
    });
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }

  static void check(const at::Tensor& flat, const at::Tensor& weight) {
    if (flat.numel() == 0) return;
    const std::int64_t low = flat.min().item<std::int64_t>(), high = flat.max().item<std::int64_t>();
    TORCH_CHECK_INDEX(low >= 0 && high < weight.size(0), "index out of range in self: ", low < 0 ? low : high,
                      " of an embedding of ", weight.size(0), " rows");
  }

  /// Calls `run` for tiles of which rows are used, with the places in `flat` that ask for them, in order.
  template <class Run>
  static void for_each_used(const at::Tensor& weight, const at::Tensor& flat, Access access, Run run) {
    if (flat.numel() == 0) return;
    const Rows all(weight);
    const std::size_t row_bytes = all.columns * weight.itemsize();
    // As many rows as a page has, wherever pages are cut.
    const auto step = static_cast<std::int64_t>(std::max<std::size_t>(all.segment->page_bytes() / row_bytes, 1));
    // Stable, so that of equal indices the order, and so the sum, stays.
    const auto [sorted, order] = flat.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
    const at::Tensor on_host = sorted.to(c10::kCPU, c10::kLong).contiguous();
    const auto* values = on_host.const_data_ptr<std::int64_t>();
    const std::int64_t count = flat.numel();
    for (std::int64_t first = 0; first < count;) {
      const std::int64_t begin = values[first] / step * step;
      const std::int64_t end = std::min(begin + step, all.rows);
      const std::int64_t last = std::lower_bound(values + first, values + count, end) - values;
      const at::Tensor places = std::get<0>(order.narrow(0, first, last - first).sort());
      Rows some = all;
      some.begin += static_cast<std::size_t>(begin * all.columns);
      some.rows = end - begin;
      const at::Tensor wanted = flat.index_select(0, places);
      for_each_tile(some, access, [&](std::int64_t row, const at::Tensor& tile) {
        const at::Tensor here = wanted.ge(begin + row).logical_and_(wanted.lt(begin + row + tile.size(0)));
        const at::Tensor own = places.index_select(0, here.nonzero().squeeze(1));
        if (own.numel() > 0) run(begin + row, tile, own);
      });
      first = last;
    }
  }
};

/// In what autocast would compute, if it is on.
at::Tensor as_autocast(const at::Tensor& tensor) {
  const auto device = tensor.device().type();
  const bool is_cast = tensor.is_floating_point() && tensor.scalar_type() != c10::kDouble;
  if (!at::autocast::is_autocast_enabled(device) || !is_cast) return tensor;
  return tensor.to(at::autocast::get_autocast_dtype(device));
}

/// Two forms of a matrix that tiles can go through: its rows, or, transposed, its columns.
enum class Form : std::uint8_t { none, rows, columns };

Form form_of(const at::Tensor& weight) {
  if (!is_tiled(weight) || weight.dim() != 2 || weight.numel() == 0 || weight.is_complex()) return Form::none;
  if (weight.is_contiguous()) return Form::rows;
  return weight.t().is_contiguous() ? Form::columns : Form::none;
}

bool has_tangent(const at::Tensor& tensor) {
  return torch::autograd::impl::get_autograd_meta(tensor) && tensor._fw_grad(/*level=*/0).defined();
}

bool is_plain(const at::Tensor& x, const at::Tensor& weight) {
  if (has_tangent(x) || has_tangent(weight) || x.is_complex()) return false;
  return x.layout() == c10::kStrided && x.device() == weight.device() && Call::plain_modes();
}

/// x [..., k] · weightᵀ where `transposed`, else x · weight, with a bias of its outputs or none.
at::Tensor tiled_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool transposed) {
  const bool by_rows = form_of(weight) == Form::rows;
  const at::Tensor cast = as_autocast(x);
  TORCH_CHECK(cast.scalar_type() == weight.scalar_type() || cast.scalar_type() != x.scalar_type() ||
                  at::autocast::is_autocast_enabled(x.device().type()),
              "expected mat1 and mat2 to have the same dtype, but got: ", x.scalar_type(),
              " != ", weight.scalar_type());
  auto sizes = x.sizes().vec();
  const std::int64_t inputs = weight.size(transposed ? 1 : 0), outputs = weight.size(transposed ? 0 : 1);
  TORCH_CHECK(x.dim() > 0 && sizes.back() == inputs, "mat1 and mat2 shapes cannot be multiplied (", x.sizes(),
              " and ", transposed ? weight.t().sizes() : weight.sizes(), ")");
  sizes.back() = outputs;
  const std::optional<at::Tensor> added = bias.defined() ? std::optional(as_autocast(bias)) : std::nullopt;
  const at::Tensor y =
      TiledProduct::apply(cast.reshape({1, -1, inputs}), by_rows ? weight : weight.t(), added, by_rows == transposed);
  return y.view(sizes);
}

}  // namespace

bool tile_linear(Call& call) {
  const at::Tensor x = call.argument(0).toTensor(), weight = call.argument(1).toTensor();
  const auto bias = call.argument(2).toOptional<at::Tensor>().value_or(at::Tensor());
  if (form_of(weight) == Form::none || !is_plain(x, weight)) return false;
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) return false;
  call.return_value(tiled_product(x, weight, bias, /*transposed=*/true));
  return true;
}

bool tile_mm(Call& call) {
  const at::Tensor x = call.argument(0).toTensor(), weight = call.argument(1).toTensor();
  if (!is_plain(x, weight)) return false;
  if (form_of(weight) != Form::none) {
    call.return_value(tiled_product(x, weight, {}, /*transposed=*/false));
    return true;
  }
  if (form_of(x) == Form::none) return false;
  call.return_value(tiled_product(weight.t(), x, {}, /*transposed=*/true).t().contiguous());
  return true;
}

bool tile_addmm(Call& call) {
  const at::Tensor bias = call.argument(0).toTensor(), x = call.argument(1).toTensor();
  const at::Tensor weight = call.argument(2).toTensor();
  if (form_of(weight) == Form::none || !is_plain(x, weight)) return false;
  const bool plain = call.argument(3).toScalar().equal(1) && call.argument(4).toScalar().equal(1);
  if (!plain || bias.dim() != 1 || bias.size(0) != weight.size(1)) return false;
  call.return_value(tiled_product(x, weight, bias, /*transposed=*/false));
  return true;
}

bool tile_bmm(Call& call) {
  const at::Tensor x = call.argument(0).toTensor(), weight = call.argument(1).toTensor();
  if (!is_tiled(weight) || weight.numel() == 0 || weight.is_complex() || !is_plain(x, weight) || x.dim() != 3 ||
      weight.dim() != 3) {
    return false;
  }
  const bool fits = x.size(0) == weight.size(0) && x.size(2) == weight.size(1);
  const bool by_rows = weight.is_contiguous();
  if (!fits || !(by_rows || weight.transpose(1, 2).is_contiguous())) return false;
  call.return_value(
      TiledProduct::apply(as_autocast(x), by_rows ? weight : weight.transpose(1, 2), std::nullopt, !by_rows));
  return true;
}

bool tile_embedding(Call& call) {
  const at::Tensor weight = call.argument(0).toTensor(), indices = call.argument(1).toTensor();
  if (form_of(weight) != Form::rows || !is_plain(indices, weight) || call.argument(4).toBool()) return false;
  const std::int64_t padding = call.argument(2).toInt();
  call.return_value(TiledEmbedding::apply(weight, indices, padding, call.argument(3).toBool()));
  return true;
}

bool tile_parts(Call& call) {
  const bool any = std::any_of(call.paged.begin(), call.paged.end(),
                               [](const PagedArgument& argument) { return is_tiled(argument.tensor); });
  if (!any || !Call::plain_modes()) return false;
  call.op.redispatchBoxed(call.below - c10::autocast_dispatch_keyset, &call.stack);  // each of its parts comes to us
  return true;
}

bool run_on_copies(Call& call) {
  if (!Call::plain_modes() || call.needs_autograd()) return false;
  const bool is_view = call.op.hasTag(at::Tag::inplace_view);
  struct Part {
    std::size_t argument;
    at::Tensor tensor, copy;
    std::int64_t version = 0;
  };
  c10::SmallVector<Part, 2> parts;
  std::size_t paged = 0;
  for (std::size_t i = 0; i < call.arguments; ++i) {
    if (!call.argument(i).isTensor()) continue;
    const at::Tensor& tensor = call.argument(i).toTensor();
    auto* segment = segment_of(tensor);
    if (!segment) continue;
    ++paged;
    const std::size_t limit = segment->domain()->cache->frame_limit();
    if (!is_tiled(tensor) || segment->bytes() <= limit || tensor.numel() == 0) continue;
    const std::size_t span = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
    if (is_view && call.name().find("resize") == std::string::npos) {  // needs no data
      c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
      call.redispatch();
      return true;
    }
    // What lies between the elements of what is written may be another argument's.
    if (is_view || span > limit / 2 || (call.info.writes[i] && span != tensor.nbytes())) return false;
    parts.push_back({i, tensor, {}});
  }
  if (parts.empty() || paged != call.paged.size()) return false;  // others are in lists
  for (Part& part : parts) {
    part.copy = copy_of_part(part.tensor);
    part.version = part.copy._version();
    call.argument(part.argument) = part.copy;
  }
  const std::vector<bool> writes(call.info.writes.begin(), call.info.writes.end());
  call.op.callBoxed(&call.stack);
  for (const Part& part : parts) {
    if (part.copy.sizes() != part.tensor.sizes() || part.copy.strides() != part.tensor.strides()) {
      throw AccessError(
          "a paged tensor keeps the size it was made with, and this operator would have to change it; give out= a "
          "tensor of the result's shape, or use an ordinary tensor");
    }
    for (std::size_t i = call.first; i < call.stack.size(); ++i) {
      if (!call.stack[i].isTensor() || !call.stack[i].toTensor().defined()) continue;
      const at::Tensor& result = call.stack[i].toTensor();
      if (result.is_same(part.copy)) {
        call.stack[i] = part.tensor;
      } else if (result.has_storage() && result.is_alias_of(part.copy)) {
        call.stack[i] = result.clone();
      }
    }
    if (writes[part.argument] || part.copy._version() != part.version) {
      copy_back(part.copy, part.tensor);
      bump_version(part.tensor);
    }
  }
  return true;
}

}  // namespace zeropage
