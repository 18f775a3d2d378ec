// Products with a tiled matrix: the arithmetic of tiled_operators.cpp and vocabulary_loss.cpp.
//
// [Note: order of summation] If rows of the weight are outputs (linear's forward, the weight's gradient, embeddings),
// tiles change no result. If a sum goes over the rows (linear's gradient of the input), tiling = "auto" adds the
// results of the tiles. "exact" instead computes a block of columns from all rows at a time, and reads the weight
// once for each block.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include "zeropage/base/errors.h"
#include "zeropage/rules/blocked_product.h"
#include "zeropage/rules/tiles.h"

namespace zeropage {

/// Makes operators compute with ordinary tensors in their own dtypes, without autograd and autocast.
struct Computing {
  OutsideScopes ordinary;
  c10::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/// Whether tiles can serve an operator on both: no tangents, no modes, ordinary layouts.
bool is_plain(const at::Tensor& x, const at::Tensor& weight);

/// Throws in a backward that cannot be differentiated, if autograd wants a graph of it.
void refuse_graph_of_gradient();

/// Saves tensors of a product with tiles of `weight`, whose input has the dtype `computed`, and the weight's place as
/// saved_data["weight"].
void save(torch::autograd::AutogradContext* context, torch::autograd::variable_list tensors, const at::Tensor& weight,
          at::ScalarType computed);

/// Returns what save() saved. Throws if the program has written one of these tensors since, as PyTorch does. Under
/// autocast PyTorch saves a cast, and the program may write the weight. Tiles save no cast; the error says so.
torch::autograd::variable_list saved_of(torch::autograd::AutogradContext* context);
/// The weight that backward reads; `saved`: what autograd returned for it, if it was saved. Like the view that
/// PyTorch's product saves, it stays the same after `weight.data = another`. But if hooks replaced what was saved, as
/// checkpoints do, it is theirs.
at::Tensor weight_of(torch::autograd::AutogradContext* context, const at::Tensor& saved);

/// At the end of a backward: drops save()'s reference to the weight, unless the graph is kept.
void forget_weight(torch::autograd::AutogradContext* context);

/// Translates our errors in a backward for autograd, which does not know them.
template <class Run>
torch::autograd::variable_list translated(Run run) {
  try {
    return run();
  } catch (const Error& error) {
    throw_translated(error, "backward of an operator in tiles");
  }
}

/// The tensor, or an ordinary copy of a paged one, because no page can be loaded while a tile is held. Throws
/// BudgetError if it is larger than the budget.
at::Tensor in_memory(const at::Tensor& tensor);
bool fits_in_memory(const at::Tensor& tensor);

/// Makes a gradient for a paged tensor, of zeros. Over ranks it is this rank's own.
at::Tensor gradient_like(const at::Tensor& weight);

/// y [t, rows] = x [t, columns] · rowsᵀ + bias.
void rows_as_outputs(const at::Tensor& y, const at::Tensor& x, const Rows& weight, const at::Tensor& bias);
/// The same for one tile of the weight, [rows, columns], in memory.
void multiply_rows(at::Tensor y, const at::Tensor& x, const at::Tensor& tile, const at::Tensor& bias);
/// y [t, columns] += x [t, rows] · rows, tile by tile.
void add_rows_summed(at::Tensor& y, const at::Tensor& x, const Rows& weight);
/// The same for one tile of the weight, [rows, columns], in memory.
void add_tile_summed(at::Tensor& y, const at::Tensor& x, const at::Tensor& tile);
/// y [t, columns] = x [t, rows] · rows, with the bits of an untiled product.
at::Tensor rows_summed_exactly(const at::Tensor& x, const Rows& weight);
/// gradient [rows, columns] = left [t, rows]ᵀ · right [t, columns].
void outer(const at::Tensor& left, const at::Tensor& right, const Rows& gradient);

/// Multiplies each part of x [b, t, k] with its part of the weight [b, rows, columns].
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool rows_are_outputs);

/// Does the same with autograd. The weight is contiguous and paged: [b, rows, columns], or [rows, columns] if b = 1.
/// Returns [b, t, outputs] of `dtype`. A result that is too large may be a LazyProduct. `stored`: its values, if they
/// are known.
at::Tensor differentiable_product(const at::Tensor& x, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, bool rows_are_outputs, at::ScalarType dtype,
                                  const c10::intrusive_ptr<BlockedProduct>& stored = {});

/// Whether a node of the graph belongs to differentiable_product().
bool is_product(const torch::autograd::Node& node);

}  // namespace zeropage
