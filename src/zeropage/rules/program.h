// Programs: operators on whole paged tensors that were called but have not run. Each reads and writes element i of
// its operands alone, so a chain of them runs page by page in one pass, however many there are: a stock optimizer in
// its single or foreach form reads and writes each page of its states once, as its fused form does.
//
// A program belongs to tensors of one shape that were operands together: a parameter, its gradient and its states.
// It runs when an operator needs the content of one of them, or is told to (run_deferred). Until then nothing of it
// has happened but that tensors' versions are counted up. So `optimizer.step()` returns at once, and parameters are
// updated in the order in which the next forward asks for them.
//
// [Note: what a program holds] Segments, not tensors. When a tensor dies its segment stays with the program as long
// as something alive is still to be made of it; what is written to it then goes nowhere. A temporary has no home: it
// lives in cache-sized pieces while the program runs, unless it is still alive then. Scalars are copied at the call:
// a learning rate or step count that changes later changes nothing.
//
// [Note: updates in the host] Of a device with memory of its own, a program on an optimizer's states that are at home
// below it may run on the host, on the pages that are there (ZeRO-Offload): gradients come down, what operators see
// of parameters goes up, and states do not move. Small tensors that share pages are updated on the device.
#pragma once

#include <memory>
#include <optional>

#include "zeropage/rules/instruction.h"

namespace zeropage {

/// While it lives, what this thread defers is of one call: a tensor that is a scalar of many elements of its lists,
/// as a clipping coefficient is, is copied once.
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

/// Appends a call to the program of its operands instead of running it. `dtype`: of the tensor it returns, for an
/// operator that writes none of its operands; that tensor is the result. nullopt, and nothing has happened, if it
/// cannot be deferred. Throws what running an earlier program throws.
std::optional<at::Tensor> defer(const c10::OperatorHandle& op, const Substitution& call, Chunking chunking,
                                std::optional<caffe2::TypeMeta> dtype);

/// Whether this call should join a program that its operand already has: an overwrite, which would else run at once.
inline bool has_program(const StorageSegment* segment) { return segment && segment->is_deferred(); }

/// What deferred operators will make of `tensor`, which is all that they write: a copy for an operator that reads it
/// once, while they stay deferred and `tensor` without a home. Undefined if `tensor` is not such.
at::Tensor preview(const at::Tensor& tensor);

}  // namespace zeropage
