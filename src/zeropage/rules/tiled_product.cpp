#include "zeropage/rules/tiled_product.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "zeropage/base/units.h"
#include "zeropage/rules/lazy_product.h"
#include "zeropage/rules/rows_to_come.h"

namespace zeropage {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_plain(const at::Tensor& x, const at::Tensor& weight) {
  if (has_tangent(x) || has_tangent(weight) || x.is_complex()) return false;
  return x.layout() == c10::kStrided && x.device() == weight.device() && Call::plain_modes();
}

void refuse_graph_of_gradient() {
  if (!c10::GradMode::is_enabled()) return;
  throw Error(
      "a second derivative by a weight that is taken in tiles is not computed; raise device_memory or tile_above so "
      "that it fits in one piece, or use create_graph=False");
}

namespace {

std::int64_t address_of(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl()));
}

/// The weight's version and, for writes through `.data`, what is known of its content.
std::vector<std::int64_t> state_of_content(const at::Tensor& weight) {
  std::vector<std::int64_t> state{static_cast<std::int64_t>(version_of(weight))};
  if (const auto* segment = segment_of(weight)) {
    const ContentMark mark = segment->content_mark();
    state.push_back(static_cast<std::int64_t>(mark.changes));
    state.push_back(static_cast<std::int64_t>(mark.deferred));
  }
  return state;
}

}  // namespace

void save(AutogradContext* context, variable_list tensors, const at::Tensor& weight, at::ScalarType computed) {
  const bool is_read_again =
      std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return t.is_same(weight); });
  if (is_read_again && weight.scalar_type() != computed) {
    if (auto* segment = segment_of(weight)) {  // the product reads it next
      segment->complete();
      segment->refresh(Access::read);
    }
    context->saved_data["content"] = state_of_content(weight);
  }
  context->saved_data["weight"] = weight.detach();  // of the same version
  context->saved_data["saved"] = address_of(weight);
  context->save_for_backward(std::move(tensors));
}

variable_list saved_of(AutogradContext* context) {
  const auto content = context->saved_data.find("content"), weight = context->saved_data.find("weight");
  if (content != context->saved_data.end() && weight != context->saved_data.end() &&
      content->second.toIntVector() != state_of_content(weight->second.toTensor())) {
    const at::Tensor written = weight->second.toTensor();
    throw Error(fmt::format(
        "one of the variables needed for gradient computation has been modified by an inplace operation: [{} [{}]] "
        "is at version {}; expected version {} instead.\n"
        "A weight in tiles is read again in backward, and no cast of it is kept for autocast. Write it after "
        "backward, or raise tile_above or device_memory so that it is taken in one piece.",
        written.toString(), fmt::join(written.sizes(), ", "), version_of(written), content->second.toIntVector()[0]));
  }
  return context->get_saved_variables();
}

at::Tensor weight_of(AutogradContext* context, const at::Tensor& saved) {
  const bool is_other = saved.defined() && context->saved_data["saved"].toInt() != address_of(saved);
  if (is_other || (c10::GradMode::is_enabled() && saved.defined())) return saved;
  return context->saved_data["weight"].toTensor();
}

void forget_weight(AutogradContext* context) {
  if (!torch::autograd::get_current_graph_task_keep_graph()) context->saved_data.erase("weight");
}

bool fits_in_memory(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  return !segment || tensor.nbytes() <= segment->frame_limit();
}

at::Tensor in_memory(const at::Tensor& tensor) {
  if (!segment_of(tensor)) return tensor;
  if (!fits_in_memory(tensor)) {
    throw BudgetError(fmt::format(
        "an operator that takes one operand in tiles needs the other whole, [{}] of {}, and device_memory holds {}: "
        "raise device_memory",
        fmt::join(tensor.sizes(), ", "), format_bytes(tensor.nbytes()),
        format_bytes(segment_of(tensor)->frame_limit())));
  }
  const c10::NoGradGuard no_grad;
  // Keep the strides: libraries may round a product with a transposed matrix differently.
  const auto strides = at::infer_dense_strides(tensor.sizes(), tensor.strides());
  return at::empty_strided(tensor.sizes(), strides, tensor.options().requires_grad(false)).copy_(tensor);
}

at::Tensor gradient_like(const at::Tensor& weight) {
  const auto& domain = paged_segment(weight).domain();
  if (!domain->partition.ranks)
    return make_paged(domain, weight.sizes(), weight.strides(), weight.dtype(), Role::gradient);
  return make_own_gradient(domain, weight.sizes(), weight.strides(), weight.dtype(), /*is_unset=*/false);
}

void multiply_rows(at::Tensor y, const at::Tensor& x, const at::Tensor& tile, const at::Tensor& bias) {
  const at::Tensor rows = tile.to(x.scalar_type());
  bias.defined() ? at::addmm_out(y, bias, x, rows.t()) : at::mm_out(y, x, rows.t());
}

void rows_as_outputs(const at::Tensor& y, const at::Tensor& x, const Rows& weight, const at::Tensor& bias) {
  for_each_tile(weight, Access::read, [&](std::int64_t row, const at::Tensor& tile) {
    const std::int64_t n = tile.size(0);
    multiply_rows(y.narrow(1, row, n), x, tile, bias.defined() ? bias.narrow(0, row, n) : at::Tensor());
  });
}

void add_tile_summed(at::Tensor& y, const at::Tensor& x, const at::Tensor& tile) {
  const at::Tensor rows = tile.to(x.scalar_type());
  y.scalar_type() == x.scalar_type() ? y.addmm_(x, rows) : y.add_(at::mm(x, rows));
}

void add_rows_summed(at::Tensor& y, const at::Tensor& x, const Rows& weight) {
  for_each_tile(weight, Access::read, [&](std::int64_t row, const at::Tensor& tile) {
    add_tile_summed(y, x.narrow(1, row, tile.size(0)), tile);
  });
}

namespace {

/// The width of a product's blocks of columns, and the number of neighbouring columns to compute on each side.
struct ColumnBlocks {
  std::int64_t least = kFewestColumns, wide, beside = 0;

  /// `column_bytes`: memory for each column.
  ColumnBlocks(std::size_t columns, std::size_t column_bytes, std::size_t item_bytes, const Domain& domain) {
    constexpr std::size_t kLine = 64;
    const auto fits = [&](std::int64_t n) { return n * column_bytes <= domain.cache->frame_limit() / 2; };
    if (!fits(least)) least = kKernelColumns;
    // If rows of the result start at different offsets in cache lines, libraries may round columns at its edges
    // differently than inside.
    if (columns * item_bytes % kLine != 0 && fits(least + 2 * kKernelColumns)) beside = kKernelColumns;
    const std::size_t room = std::min(domain.tile_above, domain.cache->frame_limit());
    const auto fitting = static_cast<std::int64_t>(room / 2 / column_bytes) - 2 * beside;
    wide = std::min<std::int64_t>(round_down(std::max(fitting, least), kKernelColumns), columns);
  }
};

}  // namespace

at::Tensor rows_summed_exactly(const at::Tensor& x, const Rows& weight) {
  const auto& domain = weight.segment->domain();
  const ColumnBlocks blocks(weight.columns, weight.rows * x.itemsize(), x.itemsize(), *domain);
  const std::int64_t block = blocks.wide, beside = blocks.beside;
  const Scratch scratch(domain, weight.rows * (block + 2 * beside), x.scalar_type());
  const at::Tensor columns = scratch.tensor().view({weight.rows, block + 2 * beside});
  at::Tensor y = at::empty({x.size(0), weight.columns}, x.options());
  const at::Tensor computed = beside > 0 ? at::empty_like(y) : y;
  for (std::int64_t begin = 0; begin < weight.columns;) {
    std::int64_t n = std::min(block, weight.columns - begin);
    const std::int64_t left = weight.columns - begin - n;
    if (left > 0 && left < blocks.least && n > blocks.least) n -= blocks.least;
    const std::int64_t first = std::max<std::int64_t>(begin - beside, 0);
    const std::int64_t width = std::min(begin + n + beside, weight.columns) - first;
    for_each_tile(weight, Access::read, [&](std::int64_t row, const at::Tensor& tile) {
      columns.narrow(0, row, tile.size(0)).narrow(1, 0, width).copy_(tile.narrow(1, first, width));
    });
    at::Tensor into = computed.narrow(1, first, width);
    at::mm_out(into, x, columns.narrow(1, 0, width));
    if (beside > 0) y.narrow(1, begin, n).copy_(computed.narrow(1, begin, n));
    begin += n;
  }
  return y;
}

namespace {

/// Rows of leftᵀ · right, from `row` on.
void multiply_into(at::Tensor rows, const at::Tensor& left, const at::Tensor& right, std::int64_t row) {
  const at::Tensor of_rows = left.narrow(1, row, rows.size(0)).t();
  rows.scalar_type() == left.scalar_type() ? at::mm_out(rows, of_rows, right) : rows.copy_(at::mm(of_rows, right));
}

}  // namespace

void outer(const at::Tensor& left, const at::Tensor& right, const Rows& gradient) {
  for_each_tile(gradient, Access::overwrite,
                [&](std::int64_t row, const at::Tensor& tile) { multiply_into(tile, left, right, row); });
}

namespace {

/// Computes the same as (rightᵀ · left)ᵀ.
void outer_transposed(const at::Tensor& left, const at::Tensor& right, const Rows& gradient) {
  for_each_tile(gradient, Access::overwrite, [&](std::int64_t row, at::Tensor tile) {
    tile.copy_(at::mm(right.t(), left.narrow(1, row, tile.size(0))).t());
  });
}

}  // namespace

at::Tensor product(const at::Tensor& given, const at::Tensor& weight, const at::Tensor& given_bias,
                   bool rows_are_outputs) {
  const Rows all(weight);
  const at::Tensor x = in_memory(given), bias = in_memory(given_bias);
  const std::int64_t parts = x.size(0), rows = all.rows / parts;
  at::Tensor y = at::empty({parts, x.size(1), rows_are_outputs ? rows : all.columns}, x.options());
  for (std::int64_t i = 0; i < parts; ++i) {
    Rows part = all.part(i, parts);
    part.at_once = part.fits_at_once();
    if (rows_are_outputs) {
      rows_as_outputs(y[i], x[i], part, bias);
      continue;
    }
    if (all.segment->domain()->tiling == Tiling::exact && !part.at_once) {
      y[i].copy_(rows_summed_exactly(x[i], part));
    } else {
      const bool narrow = c10::isReducedFloatingType(x.scalar_type());
      at::Tensor sum = narrow ? at::zeros(y[i].sizes(), x.options().dtype(c10::kFloat)) : y[i].zero_();
      add_rows_summed(sum, x[i], part);
      if (narrow) y[i].copy_(sum);
    }
    if (bias.defined()) y[i].add_(bias);
  }
  return y;
}

namespace {

class TiledProduct : public torch::autograd::Function<TiledProduct> {
 public:
  /// Its arguments have addmm's order, so that autograd makes gradients in that order.
  static at::Tensor forward(AutogradContext* context, const std::optional<at::Tensor>& bias, const at::Tensor& x,
                            const at::Tensor& weight, bool rows_are_outputs, at::ScalarType dtype, bool is_lazy,
                            c10::intrusive_ptr<BlockedProduct> stored) {
    context->set_materialize_grads(false);
    // Only x's gradient reads the weight. Without it, the program may write the weight before backward.
    save(context, {weight.requires_grad() ? x : at::Tensor(), x.requires_grad() ? weight : at::Tensor()}, weight,
         x.scalar_type());
    context->saved_data["rows_are_outputs"] = rows_are_outputs;
    context->saved_data["bias"] = bias.has_value() && bias->defined();
    context->saved_data["dtype"] = static_cast<std::int64_t>(x.scalar_type());
    const at::Tensor added = bias.value_or(at::Tensor());
    if (is_lazy && !stored && paged_segment(weight).domain()->partition.ranks) {
      const Computing computing;
      stored = BlockedProduct::make(x, weight, added);
    }
    if (is_lazy) return LazyProduct::make({x, weight, added, dtype, std::move(stored)});
    const Computing computing;
    return product(x, weight, added, rows_are_outputs).to(dtype);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return variable_list(7);
    const bool is_unshared = RowsToCome::is_unshared(gradients[0]);
    variable_list result = translated([&] { return backward_of(context, gradients, is_unshared); });
    forget_weight(context);
    return result;
  }

 private:
  /// The weight's gradient if ranks may sum it as it is made; else undefined. `is_unshared`: the given gradient.
  static at::Tensor gradient_to_come(AutogradContext* context, const at::Tensor& gradient, bool is_unshared,
                                     const at::Tensor& x, const at::Tensor& weight) {
    const bool has_bias = context->saved_data["bias"].toBool();
    if (x.size(0) != 1 || weight.dim() > 2 || !RowsToCome::can_come(has_bias ? 2 : 1, weight)) return {};
    const at::Tensor input = RowsToCome::kept(x, false, weight),
                     given = RowsToCome::kept(gradient, is_unshared, weight);
    if (!input.defined() || !given.defined()) return {};
    const bool rows_are_outputs = context->saved_data["rows_are_outputs"].toBool();
    const at::Tensor left = rows_are_outputs ? given[0] : input[0], right = rows_are_outputs ? input[0] : given[0];
    return RowsToCome::make(
        weight, [left, right](std::int64_t row, const at::Tensor& tile) { multiply_into(tile, left, right, row); });
  }

  static variable_list backward_of(AutogradContext* context, const variable_list& gradients, bool is_unshared) {
    const auto saved = saved_of(context);
    const at::Tensor& x = saved[0];
    const at::Tensor place = context->saved_data["weight"].toTensor(), weight = weight_of(context, saved[1]);
    const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    const at::Tensor arrived = gradients[0].to(dtype);
    const at::Tensor gradient = c10::GradMode::is_enabled() ? arrived : in_memory(arrived);
    const bool rows_are_outputs = context->saved_data["rows_are_outputs"].toBool();
    const bool has_bias = context->saved_data["bias"].toBool();
    const std::size_t edge_of_x = has_bias ? 1 : 0;  // a missing bias has no edge
    const bool for_weight = context->needs_input_grad(edge_of_x + 1);
    variable_list result(7);
    if (context->needs_input_grad(edge_of_x)) {
      result[1] = apply(std::nullopt, gradient, weight, !rows_are_outputs, dtype, /*is_lazy=*/false,
                        c10::intrusive_ptr<BlockedProduct>());
    }
    if (for_weight && c10::GradMode::is_enabled() && x.size(0) == 1 && !is_tiled(place)) {
      const at::Tensor &left = rows_are_outputs ? gradient : x, &right = rows_are_outputs ? x : gradient;
      result[2] = left[0].t().mm(right[0]).view(place.sizes());  // a small part fits
    } else if (for_weight) {
      refuse_graph_of_gradient();
      result[2] = gradient_to_come(context, gradient, is_unshared || !arrived.is_same(gradients[0]), x, place);
    }
    if (for_weight && !result[2].defined()) {
      const Computing computing;
      result[2] = gradient_like(place);
      const at::Tensor input = in_memory(x);
      const at::Tensor &left = rows_are_outputs ? gradient : input, &right = rows_are_outputs ? input : gradient;
      const Rows all(result[2]);
      for (std::int64_t i = 0; i < x.size(0); ++i) {
        Rows part = all.part(i, x.size(0));
        part.at_once = part.fits_at_once();
        // bmm computes inputᵀ · gradient even for a transposed weight. The library sums that in another order than
        // linear's product.
        place.dim() == 3 && rows_are_outputs ? outer_transposed(left[i], right[i], part)
                                             : outer(left[i], right[i], part);
      }
    }
    if (has_bias && context->needs_input_grad(0)) result[0] = gradient[0].sum(0);
    return result;
  }
};

}  // namespace

at::Tensor differentiable_product(const at::Tensor& x, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, bool rows_are_outputs, at::ScalarType dtype,
                                  const c10::intrusive_ptr<BlockedProduct>& stored) {
  const bool is_lazy = rows_are_outputs && x.size(0) == 1 && LazyProduct::is_worth_it(x, weight, dtype);
  const at::Tensor y = TiledProduct::apply(bias, x, weight, rows_are_outputs, dtype, is_lazy, stored);
  if (is_lazy) LazyProduct::record(y);
  return y;
}

bool is_product(const torch::autograd::Node& node) {
  return dynamic_cast<const torch::autograd::CppNode<TiledProduct>*>(&node) != nullptr;
}

}  // namespace zeropage
