// The common part of pointwise operators and elements of operator lists.
#pragma once

#include "zeropage/rules/substitution.h"

namespace zeropage {

/// Runs a call whose tensors are all operands or scalars, window by window. `written` is the operand that it writes
/// and returns, or -1 for an operator that returns a new tensor. `placement`: of a new tensor, over ranks.
at::Tensor run_pointwise_windows(const c10::OperatorHandle& op, const Substitution& call, int written,
                                 Chunking chunking, Placement placement = Placement::same);

}  // namespace zeropage
