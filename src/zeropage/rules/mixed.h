// Mixed precision. Operators and autograd see a parameter in one dtype; at home it is kept in another, more precise
// one (StorageSegment::home). Rules run on the home: initialisation, loading, optimizers. So a stock optimizer is
// mixed-precision training with full-precision master weights. What operators see follows in the same pass.
#pragma once

#include "zeropage/rules/call.h"

namespace zeropage {

/// The call's rule, on homes where its arguments have them. As a rule: false if nothing was done.
bool run_rule(Call& call);

/// An operator wrote what it sees of parameters: where that differs from what their homes would show, the homes
/// follow.
void follow_writes(const Call& call);

/// Gives `tensor` a home in `home` dtype and shows operators `visible`, in place. The content is kept as precisely as
/// the two allow. `tensor` is paged.
void give_home(at::Tensor& tensor, c10::ScalarType visible, c10::ScalarType home);

}  // namespace zeropage
