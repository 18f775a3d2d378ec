// One call of an operator on a paged tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "zeropage/rules/operator_info.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

struct PagedArgument {
  at::Tensor tensor;
  StorageSegment* segment;
  Access access;
};

struct Call {
  const c10::OperatorHandle& op;
  const OperatorInfo& info;
  c10::DispatchKeySet below;  // the keys under ours, for redispatch
  torch::jit::Stack& stack;
  std::size_t first;  // of the arguments on the stack
  std::size_t arguments;
  c10::SmallVector<PagedArgument, 4> paged = {};         // every paged tensor among the arguments, in order.
  bool has_lazy = false;                                 // a lazy product may be among the arguments.
  bool may_tile = false;                                 // one of `paged` is huge, or not always in memory.
  c10::SmallVector<StorageSegment*, 2> undeclared = {};  // written by run_whole() but not declared by the schema.

  c10::IValue& argument(std::size_t i) { return stack[first + i]; }
  const std::string& name() const { return op.schema().name(); }
  std::string argument_name(std::size_t i) const { return op.schema().arguments()[i].name(); }

  /// Fills `paged`, `has_lazy` and `may_tile`.
  void find_paged();
  /// True if autograd must see this call: a rule that computes must not take it.
  bool needs_autograd();
  /// True if no mode (fake tensors, tracing, a subclass) must see the call.
  static bool plain_modes();
  void return_nothing() { torch::jit::drop(stack, arguments); }
  void return_value(c10::IValue value) {
    torch::jit::drop(stack, arguments);
    stack.push_back(std::move(value));
  }
  /// Takes the general path: holds all paged arguments whole in memory while the operator runs. It also keeps a write
  /// that the schema does not declare, if autograd's version counter shows it.
  void run_whole();
  /// Hands the call to the keys below. Throws AccessError if a paged tensor would have to change its size.
  void redispatch();
};

/// Hides this thread's operators from the caller's modes while it lives: a program's operators are not the caller's.
/// Modes also expect Python numbers, which are already tensors in a program.
class OutsideModes {
 public:
  OutsideModes();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

/// Runs `op` on slices of pages, which cause no faults and need no autograd. Any thread may call it.
void call_below(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// The version that autograd's saved tensors check; 0 if there is none.
std::int64_t version_of(const at::Tensor& tensor);
/// Whether it takes part in forward-mode differentiation.
bool has_tangent(const at::Tensor& tensor);

/// Whether autocast is on for the device. Never on torch's "meta" device, which planned runs use.
bool autocasts_on(c10::DeviceType device);
inline bool autocasts(const at::Tensor& tensor) { return autocasts_on(tensor.device().type()); }
/// Whether autocast casts the arguments of this operator on the device.
bool autocasts(const c10::OperatorHandle& op, c10::DeviceType device);

/// Bumps the version that saved tensors check, after an in-place write that autograd did not see.
void bump_version(const at::Tensor& tensor);

}  // namespace zeropage
