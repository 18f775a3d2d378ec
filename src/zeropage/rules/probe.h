// A probe runs an operator on two elements before the operator is deferred: errors of a call are thrown by the call.
#pragma once

#include "zeropage/rules/substitution.h"

namespace zeropage {

/// Returns the dtype of the operator's result, or throws the operator's error. Nothing of the call has happened then.
/// The result is kept for calls of the same dtypes whose numbers are in the same ranges. `is_cached` = false: the
/// operator may refuse the value of a tensor of no dimension.
caffe2::TypeMeta probe(const c10::OperatorHandle& op, const Substitution& call, bool is_cached = true);

}  // namespace zeropage
