// A call seen as windows: which arguments are operands (cut into slices), which pass as they are.
#pragma once

#include "zeropage/rules/call.h"
#include "zeropage/rules/windows.h"

namespace zeropage {

/// Arguments of one call, some of them to be replaced by slices. Lists have one element.
struct Substitution {
  c10::SmallVector<Operand, 8> operands;
  c10::SmallVector<int, 16> operand_of;     // by argument: index in operands, or -1
  std::vector<c10::IValue> arguments;       // as they are
  c10::SmallVector<PinRequest, 4> scalars;  // paged arguments that pass as they are: held while it runs

  /// Adds argument i. False if it is a tensor that neither fits `shape` nor is a scalar.
  bool add(const c10::IValue& value, bool is_list, const at::Tensor& shape, Access access);
  /// Adds a paged tensor of which each element belongs to kernels::kQuantum elements of the others.
  void add_blocks(const at::Tensor& tensor, Access access);
  /// The stack for one window: `slices` in place of operands.
  torch::jit::Stack stack(c10::ArrayRef<at::Tensor> slices) const;
  bool has_paged_operand() const;
  /// Whether it writes what one of its scalars is a part of, which PyTorch refuses.
  bool writes_its_scalars() const;

 private:
  c10::SmallVector<bool, 16> list_;
};

}  // namespace zeropage
