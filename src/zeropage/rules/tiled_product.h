// Products with a matrix that is taken in tiles: the arithmetic of tiled_operators.cpp and vocabulary_loss.cpp.
//
// [Note: order of summation] Where rows of the weight are outputs (linear's forward, the weight's gradient,
// embeddings), each result is computed as without tiles. Where a sum goes over the rows (linear's gradient of the
// input), tiling = "auto" adds what each tile gives; "exact" takes a block of columns of all rows at a time, which
// reads the weight once a block.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include "zeropage/base/errors.h"
#include "zeropage/rules/tiles.h"

namespace zeropage {

/// Operators inside compute on what is there: ordinary tensors, in the dtypes they have.
struct Computing {
  OutsideScopes ordinary;
  c10::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/// Whether tiles can do what an operator on both asks for: no tangents, no modes, ordinary layouts.
bool is_plain(const at::Tensor& x, const at::Tensor& weight);

/// In backward of what has no second derivative: throws if one is asked for.
void refuse_graph_of_gradient();

/// Autograd calls backward, and knows nothing of our errors.
template <class Run>
torch::autograd::variable_list translated(Run run) {
  try {
    return run();
  } catch (const Error& error) {
    throw_translated(error, "backward of an operator in tiles");
  }
}

/// The tensor, or an ordinary one of the same content: what is paged cannot be brought while a tile is held. Throws
/// BudgetError if it is larger than what the budget could hold.
at::Tensor in_memory(const at::Tensor& tensor);
bool fits_in_memory(const at::Tensor& tensor);

/// The gradient of a paged tensor, to be filled.
at::Tensor gradient_like(const at::Tensor& weight);

/// y [t, rows] = x [t, columns] · rowsᵀ + bias.
void rows_as_outputs(const at::Tensor& y, const at::Tensor& x, const Rows& weight, const at::Tensor& bias);
/// y [t, columns] += x [t, rows] · rows, tile by tile.
void add_rows_summed(at::Tensor& y, const at::Tensor& x, const Rows& weight);
/// y [t, columns] = x [t, rows] · rows, as without tiles.
at::Tensor rows_summed_exactly(const at::Tensor& x, const Rows& weight);
/// gradient [rows, columns] = left [t, rows]ᵀ · right [t, columns].
void outer(const at::Tensor& left, const at::Tensor& right, const Rows& gradient);

/// x [b, t, k] with the b-th part of the weight, which is [b, rows, columns].
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool rows_are_outputs);

/// The same with autograd: the weight [b, rows, columns] or, of one, [rows, columns], contiguous and paged. Returns
/// [b, t, outputs] of `dtype`. Where that is too large, it may be a LazyProduct.
at::Tensor differentiable_product(const at::Tensor& x, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, bool rows_are_outputs, at::ScalarType dtype);

/// Whether a node of the graph stands for differentiable_product().
bool is_product(const torch::autograd::Node& node);

}  // namespace zeropage
