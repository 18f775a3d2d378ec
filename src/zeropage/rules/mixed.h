// Mixed precision. Operators and autograd see a parameter in one dtype; its master is kept in another, more precise
// one (StorageSegment::master). Rules run on the master: initialisation, loading, optimizers. So a stock optimizer is
// mixed-precision training with full-precision master weights. What operators see follows in the same pass.
#pragma once

#include "zeropage/rules/call.h"

namespace zeropage {

/// The call's rule, on masters where its arguments have them. As a rule: false if nothing was done.
bool run_rule(Call& call);

/// What an operator is about to write of what it sees of parameters. Where that then differs from what was
/// materialised of their masters, follow() has the masters follow.
class WrittenMasters {
 public:
  explicit WrittenMasters(const Call& call);
  /// Of raw memory that is about to be written.
  explicit WrittenMasters(StorageSegment& segment) { add(segment); }
  /// Adds the tensors that the call, which has run, wrote without declaring it.
  void add_undeclared(const Call& call);
  void follow() const;

 private:
  void add(StorageSegment& segment, bool is_before = true);
  struct Written {
    StorageSegment* segment;
    at::Tensor visible;
    at::Tensor before;  // of a master that is hi_lo: what was visible
  };
  c10::SmallVector<Written, 2> written_;
};

/// After a call that wrote masters by themselves, as a program does that was given them by state_dict(): what
/// operators see follows.
void visible_follows(const Call& call);

/// Has operators see `tensor`, which is paged, in the domain's visible dtype from now on, and gives it a master that
/// is more precise, in place. The content is kept as precisely as the two allow.
void give_master(at::Tensor& tensor, const Domain& domain);

/// The master of a whole tensor, where it is kept as a tensor of its own; else undefined.
at::Tensor stored_master(const at::Tensor& tensor);
/// The content of `tensor` as precisely as it is kept: its master, which may be put together for it. `tensor` itself
/// if it has none.
at::Tensor most_precise(const at::Tensor& tensor);

/// Makes what operators see again from the master, when the content is asked for.
void follow_master(const StorageSegment& segment);

}  // namespace zeropage
