// A call for windows: some arguments are operands, which are cut into slices; the others pass unchanged.
#pragma once

#include "zeropage/rules/call.h"
#include "zeropage/rules/windows.h"

namespace zeropage {

/// Arguments of one call. Slices will replace some of them. Lists have one element.
struct Substitution {
  c10::SmallVector<Operand, 8> operands;
  c10::SmallVector<int, 16> operand_of;     // by argument: index in operands, or -1.
  std::vector<c10::IValue> arguments;       // unchanged.
  c10::SmallVector<PinRequest, 4> scalars;  // paged arguments that pass unchanged: pinned while it runs.

  /// Adds argument i. False if it is a tensor that neither fits `shape` nor is a scalar.
  bool add(const c10::IValue& value, bool is_list, const at::Tensor& shape, Access access);
  /// Adds a paged tensor with one element for each kernels::kQuantum elements of the others.
  void add_blocks(const at::Tensor& tensor, Access access);
  /// The stack for one window: `slices` in place of operands.
  torch::jit::Stack stack(c10::ArrayRef<at::Tensor> slices) const;
  bool has_paged_operand() const;
  /// Whether it writes a tensor that contains one of its scalars, which PyTorch refuses.
  bool writes_its_scalars() const;

 private:
  c10::SmallVector<bool, 16> list_;
};

}  // namespace zeropage
