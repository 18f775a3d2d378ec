// Embeddings and indexing of tensors that are larger than memory. They read only pages whose rows are used, and write
// a gradient only for those. Over ranks, which use other rows, each reads all pages, since ranks gather them
// together.
#include <ATen/ops/_unique.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>

#include "zeropage/rules/preview.h"
#include "zeropage/rules/rows_to_come.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class Sums : std::int64_t { embedding, index_put, index_add };

class TiledEmbedding : public torch::autograd::Function<TiledEmbedding> {
 public:
  /// `sums`: the operator whose kernel sums the gradient of a row in PyTorch.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices,
                            std::int64_t padding, bool by_frequency, Sums sums) {
    context->set_materialize_grads(false);
    context->save_for_backward({indices});
    context->saved_data["weight"] = weight.detach();  // for its shape and segment; later writes do not matter
    context->saved_data["sums"] = static_cast<std::int64_t>(sums);
    context->saved_data["padding"] = padding;
    context->saved_data["by_frequency"] = by_frequency;
    const Computing computing;
    const at::Tensor flat = in_memory(indices.reshape(-1));
    check(flat, weight);
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    // Return no view of another tensor: autograd forbids writing those in place.
    const at::Tensor result = at::empty(sizes, weight.options().requires_grad(false));
    at::Tensor rows = result.view({-1, weight.size(1)});
    if (const at::Tensor previewed = preview_rows(weight, flat); previewed.defined()) {
      rows.copy_(previewed);
      return result;
    }
    for_each_used(weight, flat, Access::read,
                  [&](std::int64_t row, const at::Tensor& tile, const at::Tensor& places) {
                    rows.index_copy_(0, places, tile.index_select(0, flat.index_select(0, places) - row));
                  });
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return variable_list(5);
    variable_list result = translated([&] { return backward_of(context, gradients); });
    if (!torch::autograd::get_current_graph_task_keep_graph()) context->saved_data.erase("weight");
    return result;
  }

 private:
  static variable_list backward_of(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor indices = context->get_saved_variables()[0];
    const at::Tensor weight = context->saved_data["weight"].toTensor();
    const at::Tensor flat = in_memory(indices.reshape(-1));
    const at::Tensor rows = gradients[0].reshape({flat.numel(), weight.size(1)});
    const std::int64_t padding = context->saved_data["padding"].toInt();
    const auto sums = static_cast<Sums>(context->saved_data["sums"].toInt());
    const bool by_frequency = context->saved_data["by_frequency"].toBool();
    if (c10::GradMode::is_enabled() && !is_tiled(weight)) {  // few rows of a weight that fits
      return {at::embedding_dense_backward(rows, flat, weight.size(0), padding, by_frequency), {}, {}, {}, {}};
    }
    refuse_graph_of_gradient();
    const Computing computing;
    const auto sum_into = [padding, sums, by_frequency](const at::Tensor& indices, const at::Tensor& gradients,
                                                        std::int64_t row, at::Tensor tile, const at::Tensor& places) {
      const at::Tensor own = indices.index_select(0, places) - row;
      const std::int64_t own_padding = padding >= row && padding < row + tile.size(0) ? padding - row : -1;
      const at::Tensor given = gradients.index_select(0, places);
      if (sums == Sums::index_put) {
        tile.index_put_({own}, given, /*accumulate=*/true);
      } else if (sums == Sums::index_add) {
        tile.index_add_(0, own, given);
      } else {
        tile.copy_(at::embedding_dense_backward(given, own, tile.size(0), own_padding, by_frequency));
      }
    };
    if (!flat.is_meta() && RowsToCome::can_come(0, weight)) {
      const at::Tensor given = RowsToCome::kept(rows, /*is_unshared=*/false, weight);
      const at::Tensor named = given.defined() ? RowsToCome::kept(flat, /*is_unshared=*/false, weight) : at::Tensor();
      if (named.defined()) {
        const auto make_rows = [=, used = UsedRows(named)](std::int64_t row, const at::Tensor& tile) {
          tile.zero_();
          const at::Tensor places = used.places(row, row + tile.size(0));
          if (places.defined()) sum_into(named, given, row, tile, places);
        };
        return {RowsToCome::make(weight, make_rows), {}, {}, {}, {}};
      }
    }
    at::Tensor gradient = gradient_like(weight);  // zeros; rows that are not used stay so
    for_each_used(gradient, flat, Access::write, [&](std::int64_t row, const at::Tensor& tile, const at::Tensor& p) {
      sum_into(flat, rows, row, tile, p);
    });
    return {gradient, {}, {}, {}, {}};
  }

  /// The positions of the indices that name some rows.
  class UsedRows {
   public:
    explicit UsedRows(const at::Tensor& flat) {
      // A stable sort keeps the order of equal indices, and with it the sum.
      at::Tensor sorted;
      std::tie(sorted, order_) = flat.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
      values_ = sorted.to(c10::kCPU, c10::kLong).contiguous();
    }

    std::int64_t count() const { return values_.numel(); }
    std::int64_t value(std::int64_t i) const { return values_.const_data_ptr<std::int64_t>()[i]; }
    /// How many indices name earlier rows.
    std::int64_t before(std::int64_t row) const {
      const auto* const values = values_.const_data_ptr<std::int64_t>();
      return std::lower_bound(values, values + count(), row) - values;
    }
    /// In order; undefined if none names a row of [begin, end).
    at::Tensor places(std::int64_t begin, std::int64_t end) const {
      const std::int64_t first = before(begin), last = before(end);
      return first < last ? std::get<0>(order_.narrow(0, first, last - first).sort()) : at::Tensor();
    }

   private:
    at::Tensor order_, values_;  // on the host
  };

  static void check(const at::Tensor& flat, const at::Tensor& weight) {
    if (flat.numel() == 0 || flat.is_meta()) return;
    const std::int64_t low = flat.min().item<std::int64_t>(), high = flat.max().item<std::int64_t>();
    TORCH_CHECK_INDEX(low >= 0 && high < weight.size(0), "index out of range in self: ", low < 0 ? low : high,
                      " of an embedding of ", weight.size(0), " rows");
  }

  /// Does for_each_used() for a planned run, whose indices have no values: spreads them evenly over the rows.
  template <class Run>
  static void for_each_planned(const Rows& all, std::int64_t step, const at::Tensor& flat, Access access, Run run) {
    const auto before = [&](std::int64_t row) { return row * flat.numel() / all.rows; };
    for (std::int64_t begin = 0; begin < all.rows; begin += step) {
      Rows some = all;
      some.begin += static_cast<std::size_t>(begin * all.columns);
      some.rows = std::min(step, all.rows - begin);
      if (step < all.rows && before(begin + some.rows) == before(begin)) continue;
      for_each_tile(some, access, [&](std::int64_t row, const at::Tensor& tile) {
        const std::int64_t first = begin + row, count = before(first + tile.size(0)) - before(first);
        if (count > 0) run(first, tile, at::empty({count}, flat.options().dtype(c10::kLong)));
      });
    }
  }

  /// Calls `run` for tiles with used rows, with the positions in `flat` that name these rows, in order.
  template <class Run>
  static void for_each_used(const at::Tensor& weight, const at::Tensor& flat, Access access, Run run) {
    const Rows all(weight);
    const bool takes_all = all.segment->domain()->partition.ranks && !all.segment->is_own();
    if (flat.numel() == 0 && !takes_all) return;
    const std::size_t row_bytes = all.columns * weight.itemsize();
    // A step has as many rows as a page, whatever the page's boundaries.
    const auto step = static_cast<std::int64_t>(std::max<std::size_t>(all.segment->page_bytes() / row_bytes, 1));
    if (flat.is_meta()) return for_each_planned(all, takes_all ? all.rows : step, flat, access, run);
    const UsedRows used(flat);
    if (takes_all) {
      return for_each_tile(all, access, [&](std::int64_t row, const at::Tensor& tile) {
        const at::Tensor places = used.places(row, row + tile.size(0));
        if (places.defined()) run(row, tile, places);
      });
    }
    for (std::int64_t first = 0; first < used.count();) {
      const std::int64_t begin = used.value(first) / step * step;
      const std::int64_t end = std::min(begin + step, all.rows);
      const std::int64_t last = used.before(end);
      const at::Tensor places = used.places(begin, end);
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

/// A lookup whose result is known, with the gradient that PyTorch computes.
class KnownEmbedding : public torch::autograd::Function<KnownEmbedding> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices,
                            std::int64_t padding, bool by_frequency, const at::Tensor& rows) {
    context->set_materialize_grads(false);
    context->save_for_backward({indices});
    context->saved_data["rows"] = weight.size(0);
    context->saved_data["padding"] = padding;
    context->saved_data["by_frequency"] = by_frequency;
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    const OutsideScopes ordinary;
    at::Tensor result = at::empty(sizes, rows.options());  // no view of `rows`
    return result.copy_(rows.view(sizes));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return variable_list(5);
    return {at::embedding_dense_backward(gradients[0], context->get_saved_variables()[0],
                                         context->saved_data["rows"].toInt(), context->saved_data["padding"].toInt(),
                                         context->saved_data["by_frequency"].toBool()),
            {},
            {},
            {},
            {}};
  }
};

/// Whether such indices name rows of such a weight.
bool are_indices_of(const at::Tensor& weight, const at::Tensor& indices) {
  if (weight.dim() < 2 || weight.numel() == 0 || !weight.is_contiguous() || weight.is_complex()) return false;
  const bool are_indices = indices.scalar_type() == c10::kLong || indices.scalar_type() == c10::kInt;
  return are_indices && is_plain(indices, weight);
}

/// Whether to load rows of `weight` one by one: it is too large, or the indices name few of its rows.
bool takes_rows(const at::Tensor& weight, const at::Tensor& indices) {
  if (!are_indices_of(weight, indices)) return false;
  if (is_tiled(weight)) return true;
  return indices.numel() < weight.size(0) / 2 && is_part(weight.select(0, 0));
}

/// Looks up rows of a weight whose update is deferred, and does not run it. A scope would page the result, and a
/// trace would take the rows for a constant.
bool look_up_deferred(Call& call, const at::Tensor& weight, const at::Tensor& indices) {
  if (!are_indices_of(weight, indices) || segment_of(indices)) return false;
  if (scope_domain() || torch::jit::tracer::isTracing()) return false;
  const at::Tensor rows = preview_rows(weight, indices.reshape(-1));
  if (!rows.defined()) return false;
  call.return_value(
      KnownEmbedding::apply(weight, indices, call.argument(2).toInt(), call.argument(3).toBool(), rows));
  return true;
}

/// Rows of a tensor of any dimensions, [indices..., rest...], with a gradient.
at::Tensor rows_of(const at::Tensor& weight, const at::Tensor& indices, Sums sums) {
  auto sizes = indices.sizes().vec();
  sizes.insert(sizes.end(), weight.sizes().begin() + 1, weight.sizes().end());
  return TiledEmbedding::apply(weight.flatten(1), indices, std::int64_t{-1}, false, sums).view(sizes);
}

}  // namespace

bool tile_embedding(Call& call) {
  const at::Tensor weight = call.argument(0).toTensor(), indices = call.argument(1).toTensor();
  if (weight.dim() != 2 || call.argument(4).toBool()) return false;
  if (!is_tiled(weight)) return look_up_deferred(call, weight, indices);
  if (!takes_rows(weight, indices)) return false;
  const std::int64_t padding = call.argument(2).toInt();
  call.return_value(TiledEmbedding::apply(weight, indices, padding, call.argument(3).toBool(), Sums::embedding));
  return true;
}

bool tile_embedding_bag(Call& call) {
  const at::Tensor weight = call.argument(0).toTensor(), indices = call.argument(1).toTensor();
  if (weight.dim() != 2 || !is_tiled(weight) || !takes_rows(weight, indices) || call.argument(5).toBool())
    return false;
  if (indices.dim() != 1) return false;
  // Run the bag over an ordinary tensor of only the used rows, in the same order.
  auto [used, places] = at::_unique(indices, /*sorted=*/true, /*return_inverse=*/true);
  if (call.arguments == 9 && !call.argument(8).isNone()) {
    const std::int64_t given = call.argument(8).toInt(), padding = given < 0 ? given + weight.size(0) : given;
    const at::Tensor place = used.eq(padding).nonzero();
    // Without a padding index, the operator adds in another order: the padding's row comes along if no bag uses it.
    call.argument(8) = place.numel() ? place.item<std::int64_t>() : used.numel();
    if (place.numel() == 0) used = at::cat({used, used.new_full({1}, padding)});
  }
  call.argument(0) = rows_of(weight, used, Sums::embedding);
  call.argument(1) = places.to(indices.scalar_type());
  const bool takes_highest = call.argument(4).toInt() == 2;
  call.op.callBoxed(&call.stack);
  if (takes_highest && used.numel() > 0) {  // the original row numbers; for empty bags the kernel's value
    const at::Tensor highest = call.stack.back().toTensor(), sizes = call.stack[call.stack.size() - 2].toTensor();
    const at::Tensor rows = used.index_select(0, highest.clamp_min(0).flatten()).view_as(highest);
    call.stack.back() = at::where(sizes.unsqueeze(1).gt(0), rows.to(highest.scalar_type()), highest);
  }
  return true;
}

bool tile_index_select(Call& call) {
  const at::Tensor weight = call.argument(0).toTensor(), indices = call.argument(2).toTensor();
  if (call.argument(1).toInt() != 0 || indices.dim() != 1 || !takes_rows(weight, indices)) return false;
  call.return_value(rows_of(weight, indices, Sums::index_add));
  return true;
}

bool tile_index(Call& call) {
  const at::Tensor weight = call.argument(0).toTensor();
  const auto given = call.argument(1).toListRef();
  if (given.size() != 1 || !given[0].isTensor()) return false;
  const at::Tensor indices = given[0].toTensor();
  if (!indices.defined() || (indices.scalar_type() != c10::kLong && indices.scalar_type() != c10::kInt)) return false;
  if (indices.device() != weight.device() || !takes_rows(weight, indices)) return false;
  call.return_value(rows_of(weight, at::where(indices.lt(0), indices + weight.size(0), indices), Sums::index_put));
  return true;
}

}  // namespace zeropage
