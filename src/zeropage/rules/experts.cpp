// Mixtures of experts that share one tensor. Only the pages of experts in use are loaded, and only these experts have
// a gradient. A program selects an expert by a view (weight[i]) or by a grouped product. Over ranks, which use
// different experts, a grouped product gathers the pages of all.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Ranges = std::vector<NonZero::Range>;

/// Sorts ranges and joins those that overlap or touch.
Ranges united(Ranges ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  Ranges apart;
  for (const NonZero::Range& range : ranges) {
    if (apart.empty() || range.begin > apart.back().end) {
      apart.push_back(range);
    } else {
      apart.back().end = std::max(apart.back().end, range.end);
    }
  }
  return apart;
}

Ranges intersection(const Ranges& a, const Ranges& b) {
  Ranges both;
  for (const NonZero::Range& one : a) {
    for (const NonZero::Range& other : b) {
      const NonZero::Range common{std::max(one.begin, other.begin), std::min(one.end, other.end)};
      if (common.begin < common.end) both.push_back(common);
    }
  }
  return both;
}

/// The elements of `of` outside `others`, which are in order and apart.
Ranges without(const Ranges& of, const Ranges& others) {
  Ranges left;
  for (NonZero::Range range : of) {
    for (const NonZero::Range& other : others) {
      if (other.end <= range.begin || other.begin >= range.end) continue;
      if (other.begin > range.begin) left.push_back({range.begin, other.begin});
      range.begin = std::min(other.end, range.end);
    }
    if (range.begin < range.end) left.push_back(range);
  }
  return left;
}

/// Records the ranges of a gradient that is zero elsewhere.
void mark_nonzero(const at::Tensor& gradient, Ranges ranges, Ranges fresh) {
  auto& segment = *segment_of(gradient);
  segment.set_nonzero(
      std::make_unique<NonZero>(NonZero{std::move(ranges), std::move(fresh), segment.content_mark()}));
}

/// Records the ranges of a gradient that one operator made.
void mark_made(const at::Tensor& gradient, Ranges used) {
  const Ranges ranges = united(std::move(used));
  mark_nonzero(gradient, ranges, ranges);
}

/// Calls `run` with pages of `to`, from `begin` on, and the corresponding elements of `from`, from `from_begin` on.
void with_pages_of_both(const at::Tensor& to, std::size_t begin, const at::Tensor& from, std::size_t from_begin,
                        std::int64_t n, Access access,
                        c10::function_ref<void(at::Tensor into, const at::Tensor& piece)> run) {
  for_each_tile(Rows::elements(to, begin, n), access, [&](std::int64_t done, const at::Tensor& into) {
    for_each_tile(Rows::elements(from, from_begin + done, into.size(0)), Access::read,
                  [&](std::int64_t at, const at::Tensor& piece) { run(into.narrow(0, at, piece.size(0)), piece); });
  });
}

/// Makes the gradient of a tensor from that of its part: the rows from `first` on, `taken` of them.
bool widen(Call& call, std::int64_t first, std::int64_t taken) {
  const at::Tensor gradient = call.argument(0).toTensor();
  const auto sizes = call.argument(1).toIntVector();
  if (call.needs_autograd() || !Call::plain_modes() || !gradient.is_contiguous() || !is_whole(gradient)) return false;
  const auto* part = segment_of(gradient);
  if (!part || part->domain()->partition.ranks || sizes.empty() || gradient.numel() == 0) return false;
  const std::int64_t rows = c10::multiply_integers(sizes.begin() + 1, sizes.end());
  if (gradient.numel() != taken * rows) return false;
  const c10::NoGradGuard no_grad;
  const at::Tensor whole =
      make_paged(part->domain(), sizes, c10::contiguous_strides(sizes), gradient.dtype(), Role::gradient);
  const auto begin = static_cast<std::size_t>(first * rows);
  with_pages_of_both(whole, begin, gradient, 0, gradient.numel(), Access::overwrite,
                     [](const at::Tensor& into, const at::Tensor& piece) { into.copy_(piece); });
  mark_made(whole, {{begin, begin + gradient.numel()}});
  call.return_value(whole);
  return true;
}

/// Multiplies x [t, k] with experts [e, rows, columns], contiguous and paged. ends [e]: the end of each expert's rows
/// of x.
class GroupedProduct : public torch::autograd::Function<GroupedProduct> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& ends, bool rows_are_outputs) {
    context->set_materialize_grads(false);
    context->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight, ends});
    context->saved_data["rows_are_outputs"] = rows_are_outputs;
    const Computing computing;
    return products(x, weight, ends, rows_are_outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return variable_list(4);
    return translated([&]() -> variable_list {
      const auto saved = context->get_saved_variables();
      const at::Tensor &x = saved[0], &weight = saved[1], &ends = saved[2], arrived = gradients[0].contiguous();
      const at::Tensor gradient = c10::GradMode::is_enabled() ? arrived : in_memory(arrived);
      const bool rows_are_outputs = context->saved_data["rows_are_outputs"].toBool();
      variable_list result(4);
      if (context->needs_input_grad(0)) result[0] = apply(gradient, weight, ends, !rows_are_outputs);
      if (context->needs_input_grad(1)) {
        refuse_graph_of_gradient();
        const Computing computing;
        result[1] = gradient_like(weight);
        const Rows all(result[1]);
        const at::Tensor input = in_memory(x);
        Ranges used;
        for_each_group(ends, /*all=*/false, [&](std::int64_t expert, std::int64_t first, std::int64_t n) {
          const at::Tensor given = input.narrow(0, first, n), of_result = gradient.narrow(0, first, n);
          const Rows part = all.part(expert, weight.size(0));
          rows_are_outputs ? outer(of_result, given, part) : outer(given, of_result, part);
          used.push_back({part.begin, part.begin + static_cast<std::size_t>(part.rows * part.columns)});
        });
        mark_made(result[1], std::move(used));
      }
      return result;
    });
  }

 private:
  /// `all`: also for experts that no row uses.
  template <class Run>
  static void for_each_group(const at::Tensor& ends, bool all, Run run) {
    const auto* end = ends.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0, first = 0; i < ends.numel(); first = end[i++]) {
      if (all || end[i] > first) run(i, first, end[i] - first);
    }
  }

  static at::Tensor products(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ends,
                             bool rows_are_outputs) {
    const at::Tensor y = at::zeros({x.size(0), weight.size(rows_are_outputs ? 1 : 2)}, x.options());
    const auto& segment = paged_segment(weight);
    const bool takes_all = segment.domain()->partition.ranks && !segment.is_own();
    for_each_group(ends, takes_all, [&](std::int64_t expert, std::int64_t first, std::int64_t n) {
      y.narrow(0, first, n)
          .copy_(product(x.narrow(0, first, n).unsqueeze(0), weight.select(0, expert), {}, rows_are_outputs)[0]);
    });
    return y;
  }
};

}  // namespace

bool tile_grouped_mm(Call& call) {
  const at::Tensor x = call.argument(0).toTensor(), weight = call.argument(1).toTensor();
  const auto ends = call.argument(2).toOptional<at::Tensor>().value_or(at::Tensor());
  if (weight.dim() != 3 || weight.numel() == 0 || x.dim() != 2 || !ends.defined() || ends.dim() != 1) return false;
  if (!is_tiled(weight) && !is_part(weight.select(0, 0))) return false;
  const bool by_rows = weight.is_contiguous();
  if (!by_rows && !weight.transpose(1, 2).is_contiguous()) return false;
  const bool plain =
      call.argument(3).isNone() && (call.argument(4).isNone() || call.argument(4).toScalarType() == x.scalar_type());
  if (!plain || !is_plain(x, weight) || x.size(1) != weight.size(1) || ends.size(0) != weight.size(0)) return false;
  if (x.scalar_type() != weight.scalar_type()) return false;
  const at::Tensor known = ends.to(c10::kCPU, c10::kLong).contiguous();
  const auto* end = known.const_data_ptr<std::int64_t>();
  if (end[0] < 0 || end[known.numel() - 1] > x.size(0) || !std::is_sorted(end, end + known.numel())) return false;
  call.return_value(GroupedProduct::apply(x, by_rows ? weight : weight.transpose(1, 2), known, !by_rows));
  return true;
}

bool widen_select(Call& call) {
  const auto sizes = call.argument(1).toIntVector();
  if (call.argument(2).toInt() != 0 || sizes.size() < 2) return false;  // a vector has no rows
  const std::int64_t index = call.argument(3).toInt();
  return widen(call, index < 0 ? index + sizes[0] : index, 1);
}

bool widen_slice(Call& call) {
  const auto sizes = call.argument(1).toIntVector();
  if (call.argument(2).toInt() != 0 || sizes.empty() || call.argument(5).toInt() != 1) return false;
  const auto place = [&](std::int64_t at) {
    return std::clamp<std::int64_t>(at < 0 ? at + sizes[0] : at, 0, sizes[0]);
  };
  const std::int64_t first = place(call.argument(3).toInt()), last = place(call.argument(4).toInt());
  return last > first && widen(call, first, last - first);
}

bool add_nonzero(Call& call) {
  if (call.name() != "aten::add_" || call.arguments != 3 || call.paged.size() != 2) return false;
  const auto& [sum, into, _] = call.paged[0];
  const auto& [part, from, __] = call.paged[1];
  const auto* nonzero = from->nonzero();
  if (!nonzero || into == from || !is_whole(sum) || !is_whole(part) || sum.dtype() != part.dtype()) return false;
  if (sum.sizes() != part.sizes() || sum.strides() != part.strides() || into->domain() != from->domain())
    return false;
  if (!call.argument(2).toScalar().equal(1)) return false;
  const auto* others = into->nonzero();
  if (!others) return false;
  Ranges all = others->ranges;
  all.insert(all.end(), nonzero->ranges.begin(), nonzero->ranges.end());
  Ranges fresh = intersection(others->fresh, nonzero->fresh);
  // -0 in the sum plus a zero of the other becomes +0.
  for (const auto& range : without(others->fresh, nonzero->ranges)) {
    for_each_tile(Rows::elements(sum, range.begin, static_cast<std::int64_t>(range.end - range.begin)), Access::write,
                  [](std::int64_t, at::Tensor tile) { tile.add_(0); });
  }
  for (const auto& range : nonzero->ranges) {
    with_pages_of_both(sum, range.begin, part, range.begin, static_cast<std::int64_t>(range.end - range.begin),
                       Access::write, [](at::Tensor to, const at::Tensor& piece) { to.add_(piece); });
  }
  mark_nonzero(sum, united(std::move(all)), std::move(fresh));
  return true;
}

}  // namespace zeropage
