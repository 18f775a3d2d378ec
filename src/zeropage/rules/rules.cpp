#include "zeropage/rules/rules.h"

#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace zeropage {

Rule find_rule(const std::string& name, const std::string& overload, const OperatorInfo& info) {
  static const auto* table = new std::unordered_map<std::string, Rule>{
      {"zero_.", run_zero},
      {"fill_.Scalar", run_fill},
      {"fill_.Tensor", run_fill},
      {"copy_.", run_copy},
      {"linalg_vector_norm.", run_norm},
      {"norm.Scalar", run_norm},
      {"_amp_foreach_non_finite_check_and_unscale_.", run_unscale},
      {"select_backward.", widen_select},
      {"slice_backward.", widen_slice},
      {"clone.", make_clone},
      {"_to_copy.", make_converted},
      {"empty_like.", make_like},
      {"zeros_like.", make_like},
      {"ones_like.", make_like},
      {"full_like.", make_like},
      {"rand_like.", make_like},
      {"randn_like.", make_like},
      {"new_zeros.", make_new},
      {"new_empty.", make_new},
      {"new_ones.", make_new},
      {"new_full.", make_new},
      {"empty.memory_format", make_in_scope},
      {"empty_permuted.", make_in_scope},
      {"empty_strided.", make_in_scope},
      {"zeros.", make_in_scope},
      {"ones.", make_in_scope},
      {"full.", make_in_scope},
      {"rand.", make_in_scope},
      {"rand.generator", make_in_scope},
      {"randn.", make_in_scope},
      {"randn.generator", make_in_scope},
  };
  if (auto found = table->find(name + "." + overload); found != table->end()) return found->second;
  if (info.list) return run_list;
  if (info.fills) return run_random;
  if (info.pointwise) return run_pointwise;
  return nullptr;
}

Rule find_tile_rule(const std::string& name, const std::string& overload) {
  static const auto* table = new std::unordered_map<std::string, Rule>{
      {"linear.", tile_linear},
      {"mm.", tile_mm},
      {"addmm.", tile_addmm},
      {"bmm.", tile_bmm},
      {"matmul.", tile_parts},
      {"einsum.", tile_parts},
      {"embedding.", tile_embedding},
      {"_grouped_mm.", tile_grouped_mm},
      {"embedding_bag.", tile_embedding_bag},
      {"embedding_bag.padding_idx", tile_embedding_bag},
      {"index_select.", tile_index_select},
      {"any.", tile_reduction},
      {"all.", tile_reduction},
      {"max.", tile_reduction},
      {"min.", tile_reduction},
      {"count_nonzero.", tile_reduction},
      {"sum.", tile_reduction},
      {"equal.", tile_equal},
      {"index.Tensor", tile_index},
      {"cat.", join_one_by_one},
      {"stack.", join_one_by_one},
      {"concat.", join_parts},
      {"concatenate.", join_parts},
      {"hstack.", join_parts},
      {"vstack.", join_parts},
      {"row_stack.", join_parts},
      {"dstack.", join_parts},
      {"column_stack.", join_parts},
  };
  const auto found = table->find(name + "." + overload);
  return found != table->end() ? found->second : nullptr;
}

bool makes_sparse(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "sparse_coo_tensor",
      "_sparse_coo_tensor_unsafe",
      "_sparse_coo_tensor_with_dims_and_tensors",
      "sparse_compressed_tensor",
      "_sparse_compressed_tensor_unsafe",
      "_sparse_compressed_tensor_with_dims",
      "sparse_csr_tensor",
      "_sparse_csr_tensor_unsafe",
      "sparse_csc_tensor",
      "_sparse_csc_tensor_unsafe",
      "sparse_bsr_tensor",
      "_sparse_bsr_tensor_unsafe",
      "sparse_bsc_tensor",
      "_sparse_bsc_tensor_unsafe",
  };
  return names.count(name) > 0;
}

}  // namespace zeropage
