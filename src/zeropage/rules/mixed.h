// Mixed precision. Operators and autograd see a parameter in one dtype; at home it is kept in another, more precise
// one (StorageSegment::home). Rules run on the home: initialisation, loading, optimizers. So a stock optimizer is
// mixed-precision training with full-precision master weights. What operators see follows in the same pass.
#pragma once

#include "zeropage/rules/call.h"

namespace zeropage {

/// The call's rule, on homes where its arguments have them. As a rule: false if nothing was done.
bool run_rule(Call& call);

/// What an operator is about to write of what it sees of parameters. Where that then differs from what their homes
/// show, follow() has the homes follow.
class WrittenHomes {
 public:
  explicit WrittenHomes(const Call& call);
  void follow() const;

 private:
  struct Written {
    StorageSegment* segment;
    at::Tensor visible;
    at::Tensor before;  // of a home that is split: what was visible
  };
  c10::SmallVector<Written, 2> written_;
};

/// Has operators see `tensor`, which is paged, in the domain's visible dtype from now on, and gives it a home that is
/// more precise, in place. The content is kept as precisely as the two allow.
void give_home(at::Tensor& tensor, const Domain& domain);

}  // namespace zeropage
