// One call of an operator that met a paged tensor, and what is known of the operator. A rule is a function that runs
// such a call where the bytes live, without bringing whole tensors in; it says whether it did.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

struct Call;
/// True: done, results are on the stack. False: nothing was done, and the general path takes the call.
using Rule = bool (*)(Call& call);

enum class OperatorKind : std::uint8_t {
  view,      // every result aliases an argument that is not written: needs no data
  metadata,  // asks about a tensor, or makes another like it: needs no data
  data,
};

/// What a schema says, worked out once an operator.
struct OperatorInfo {
  OperatorKind kind = OperatorKind::data;
  bool pointwise = false;  // element i of the result depends on element i of the arguments alone
  bool list = false;       // a _foreach_ or _fused_ operator: element i of the lists is a call of its own
  bool fused = false;
  bool takes_tensors = false;
  bool moves = false;            // to(): a view where nothing changes, a copy where something does
  bool made_of_views = false;    // a view that needs no other kind of operator
  bool fills = false;            // overwrites its first argument at random
  bool sets = false;             // gives its first argument another storage
  bool cuts_by_content = false;  // a view whose cuts are the content of its second argument
  bool seeded = false;           // draws random numbers
  bool is_constant = false;      // has no derivative: true or false of each element, or of all
  bool makes_sparse = false;     // of tensors of indices and values
  Rule rule = nullptr;
  Rule tile = nullptr;                 // for operands that are too large to be whole (tiles.h)
  c10::SmallVector<bool, 16> writes;   // by argument
  c10::SmallVector<bool, 16> numbers;  // by argument: a value to compute with, or a list of them
};

/// Found once an operator and thread; the reference stays, also when the operator's library is unloaded.
const OperatorInfo& info_of(const c10::OperatorHandle& op);

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
  c10::SmallVector<PagedArgument, 4> paged = {};         // every paged tensor among them, in order
  bool has_lazy = false;                                 // a lazy product may be among them
  bool may_tile = false;                                 // one of `paged` is huge, or not always in memory
  c10::SmallVector<StorageSegment*, 2> undeclared = {};  // what run_whole() wrote and the schema does not declare

  c10::IValue& argument(std::size_t i) { return stack[first + i]; }
  const std::string& name() const { return op.schema().name(); }
  std::string argument_name(std::size_t i) const { return op.schema().arguments()[i].name(); }

  /// Fills `paged`, `has_lazy` and `may_tile`.
  void find_paged();
  /// True if autograd would have to see this call: a rule that computes must leave it alone.
  bool needs_autograd();
  /// True if no mode (fake tensors, tracing, a subclass) wants to see what the call does.
  static bool plain_modes();
  void return_nothing() { torch::jit::drop(stack, arguments); }
  void return_value(c10::IValue value) {
    torch::jit::drop(stack, arguments);
    stack.push_back(std::move(value));
  }
  /// The general path: all paged arguments whole in memory while the operator runs. A write of an argument that the
  /// schema does not declare is kept if autograd's version counter shows it.
  void run_whole();
  /// Hands the call to the keys below. Throws AccessError if a paged tensor would have to change its size.
  void redispatch();
};

/// While it lives, no mode of the caller's sees this thread's operators: those of programs are not its own. And a
/// mode is given Python's numbers in place of the tensors that they became.
class OutsideModes {
 public:
  OutsideModes();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

/// Runs `op` on tensors that are not ours to fault on and need no autograd: slices of pages. On any thread.
void call_below(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// What autograd's saved tensors check; 0 where there is none.
std::int64_t version_of(const at::Tensor& tensor);
/// Whether forward-mode derivatives go through it.
bool has_tangent(const at::Tensor& tensor);

/// Whether autocast casts operators there. Not on torch's "meta" device, where runs are planned.
bool autocasts_on(c10::DeviceType device);
inline bool autocasts(const at::Tensor& tensor) { return autocasts_on(tensor.device().type()); }
/// Whether it casts the arguments of this operator there.
bool autocasts(const c10::OperatorHandle& op, c10::DeviceType device);

/// An in-place write that autograd did not see must still bump the version that saved tensors check.
void bump_version(const at::Tensor& tensor);

}  // namespace zeropage
