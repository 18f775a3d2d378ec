// Mixed precision. Operators and autograd see a parameter in one dtype, its low-precision copy. Its master has
// another, more precise one (StorageSegment::master). Rules run on the master: initialisation, loading, optimizers.
// Any stock optimizer therefore trains with full-precision master weights. The same pass updates the low-precision
// copy.
#pragma once

#include "zeropage/rules/call.h"

namespace zeropage {

/// Runs the call's rule, on masters if its arguments have them. False if it did nothing, like any rule.
bool run_rule(Call& call);

/// Records low-precision copies that an operator will write. follow() then writes changed elements to the masters.
class WrittenMasters {
 public:
  explicit WrittenMasters(const Call& call);
  /// For code that will write a segment's raw memory.
  explicit WrittenMasters(StorageSegment& segment) { add(segment); }
  /// Adds the tensors that the call, which has run, wrote without declaring it.
  void add_undeclared(const Call& call);
  void follow() const;

 private:
  void add(StorageSegment& segment, bool is_before = true);
  struct Written {
    StorageSegment* segment;
    at::Tensor visible;
    at::Tensor before;      // the earlier visible content, if the master is hi_lo and the write was declared
    bool is_before = true;  // made before the write
  };
  c10::SmallVector<Written, 2> written_;
};

/// Updates low-precision copies after a call that wrote masters directly, for example masters from state_dict().
void visible_follows(const Call& call);

/// Gives a paged tensor a more precise master, in place; operators see it in the domain's compute_dtype from now on.
/// Both together keep the content as precisely as they can.
void give_master(at::Tensor& tensor, const Domain& domain);

/// The master of a whole tensor, if it is a tensor of its own; else undefined.
at::Tensor stored_master(const at::Tensor& tensor);
/// The most precise content of `tensor`: its master, which may be joined for this call, or `tensor` itself.
at::Tensor most_precise(const at::Tensor& tensor);

/// Makes the low-precision copy again from the master, when an operator needs the content.
void follow_master(const StorageSegment& segment);

}  // namespace zeropage
