// Programs: operators on whole paged tensors that were called but have not run. Element i of an operand depends only
// on element i of the others, so a chain of operators runs page by page in one pass, whatever its length. A stock
// optimizer in its single or foreach form therefore reads and writes each page of its states once, like its fused
// form.
//
// A program belongs to tensors of one shape that were operands together: a parameter, its gradient and its states. It
// runs when an operator needs the content of one of them, or when run_deferred() is called. Until then only the
// tensors' versions have changed. `optimizer.step()` thus returns at once, and parameters are updated in the order in
// which the next forward uses them.
//
// [Note: what a program holds] A program holds segments, not tensors. When a tensor dies, the program keeps its
// segment while something alive still depends on it; writes to it are then dropped. A temporary has no home: it uses
// cache-sized pieces while the program runs, unless a tensor still holds it. Scalars are copied at the call: a later
// change of a learning rate or step count has no effect.
//
// [Note: updates in the host] With a device that has its own memory, optimizer states may have their home below it. A
// program on such states may run on the host, on the pages there (ZeRO-Offload). Gradients go down, low-precision
// copies of parameters go up, and states do not move. Small tensors that share pages are updated on the device.
#pragma once

#include <memory>
#include <optional>

#include "zeropage/rules/instruction.h"

namespace zeropage {

/// Marks all that this thread defers while it lives as one call. If a tensor is a scalar for many elements of its
/// lists, for example a clipping coefficient, it is copied once.
class OneCall {
 public:
  OneCall();
  ~OneCall();
  OneCall(const OneCall&) = delete;
  OneCall& operator=(const OneCall&) = delete;
  struct Copy {
    at::Tensor original;
    at::Tensor kept;
    HostCopy in_host;
  };
  std::vector<Copy> copies;

 private:
  OneCall* outer_;
};

/// Appends a call to the program of its operands instead of running it. `dtype`: the result's, for an operator that
/// writes none of its operands; defer() then returns the result. nullopt, and nothing has happened, if it cannot be
/// deferred. `result`: a tensor without a home, to be the result. Throws errors of earlier programs that it runs.
std::optional<at::Tensor> defer(const c10::OperatorHandle& op, const Substitution& call, Chunking chunking,
                                std::optional<caffe2::TypeMeta> dtype, at::Tensor result = {});

/// Whether the operand already has a program, which an overwrite should join: it would otherwise run at once.
inline bool has_program(const StorageSegment* segment) { return segment && segment->is_deferred(); }

}  // namespace zeropage
