// The table of rules: the operators that run where the bytes are. Each family has a file of its own.
#pragma once

#include <string>

#include "zeropage/rules/call.h"

namespace zeropage {

/// The rule for an operator of aten, without the "aten::"; null if it takes the general path.
Rule find_rule(const std::string& name, const std::string& overload, const OperatorInfo& info);

/// Whether an operator of aten makes a sparse tensor from its parts.
bool makes_sparse(std::string_view name);

/// The rule for operands that are too large to be whole in memory; null if there is none.
Rule find_tile_rule(const std::string& name, const std::string& overload);

// tiled_operators.cpp:
bool tile_linear(Call& call);
bool tile_mm(Call& call);
bool tile_addmm(Call& call);
bool tile_bmm(Call& call);
bool tile_embedding(Call& call);        // tiled_embedding.cpp
bool tile_embedding_bag(Call& call);    // tiled_embedding.cpp
bool tile_index_select(Call& call);     // tiled_embedding.cpp
bool tile_index(Call& call);            // tiled_embedding.cpp: weight[indices]
bool tile_grouped_mm(Call& call);       // experts.cpp
bool widen_select(Call& call);          // experts.cpp: backward of weight[i]
bool widen_slice(Call& call);           // experts.cpp: backward of weight[i:j]
bool add_nonzero(Call& call);           // experts.cpp: sum += a gradient that is known to be mostly zero
bool take_vocabulary_loss(Call& call);  // vocabulary_loss.cpp: cross entropy of a lazy product
bool tile_reduction(Call& call);        // reductions.cpp: extremes, any, all, counts
bool tile_equal(Call& call);            // reductions.cpp: equal() of two tensors
bool join_one_by_one(Call& call);       // joins.cpp: cat and stack
bool join_parts(Call& call);            // joins.cpp: operators made of these
bool tile_parts(Call& call);            // operators made of others
bool run_on_copies(Call& call);         // any operator, on small views of huge tensors

bool run_pointwise(Call& call);   // pointwise.cpp: page by page, in place or into a new paged tensor
bool run_list(Call& call);        // lists.cpp: _foreach_ and _fused_ operators, tensor by tensor, page by page
bool run_norm(Call& call);        // norms.cpp: a whole tensor if it fits, else page by page
bool run_norms(Call& call);       // norms.cpp: _foreach_norm of tensors that are too large, or partitioned
bool run_unscale(Call& call);     // scaler.cpp: GradScaler's unscaling and search for infinities and NaNs
bool run_zero(Call& call);        // overwrites.cpp: zero_
bool run_fill(Call& call);        // overwrites.cpp: fill_
bool run_copy(Call& call);        // overwrites.cpp: copy_
bool run_random(Call& call);      // overwrites.cpp: normal_, uniform_ and their like
bool make_like(Call& call);       // creations.cpp: zeros_like and its like
bool make_new(Call& call);        // creations.cpp: new_zeros and its like
bool make_clone(Call& call);      // creations.cpp: clone
bool make_converted(Call& call);  // creations.cpp: _to_copy
bool make_in_scope(Call& call);   // creations.cpp: empty, zeros, randn, … inside an init scope
void make_sparse(Call& call);     // creations.cpp: a sparse tensor of paged indices and values, always
bool make_from_meta(Call& call);  // creations.cpp: Module.to_empty() of tensors without data, in an init scope

}  // namespace zeropage
