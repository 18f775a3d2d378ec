#include "zeropage/rules/substitution.h"

#include <algorithm>

#include "zeropage/kernels/formats.h"

namespace zeropage {

bool Substitution::add(const c10::IValue& value, bool is_list, const at::Tensor& shape, Access access) {
  arguments.push_back(value);
  operand_of.push_back(-1);
  list_.push_back(is_list);
  if (!value.isTensor() || !value.toTensor().defined()) return true;
  const at::Tensor& tensor = value.toTensor();
  const bool has_memory = !tensor._is_zerotensor();
  if (shape.dim() > 0 && has_memory && is_operand(tensor, shape)) {
    operand_of.back() = static_cast<int>(operands.size());
    operands.push_back({tensor, segment_of(tensor), access});
    return true;
  }
  if (tensor.dim() != 0) return false;
  if (auto* segment = segment_of(tensor)) scalars.push_back({segment, access});
  return true;
}

void Substitution::add_blocks(const at::Tensor& tensor, Access access) {
  arguments.push_back(tensor);
  operand_of.push_back(static_cast<int>(operands.size()));
  list_.push_back(false);
  operands.push_back({tensor, segment_of(tensor), access, kernels::kQuantum});
}

torch::jit::Stack Substitution::stack(c10::ArrayRef<at::Tensor> slices) const {
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue value = operand_of[i] < 0 ? arguments[i] : c10::IValue(slices[operand_of[i]]);
    if (list_[i]) {
      c10::List<at::Tensor> list;
      list.push_back(value.toTensor());
      value = std::move(list);
    }
    stack.push_back(std::move(value));
  }
  return stack;
}

bool Substitution::writes_its_scalars() const {
  return std::any_of(operands.begin(), operands.end(), [&](const Operand& operand) {
    return operand.segment && operand.access != Access::read &&
           std::any_of(scalars.begin(), scalars.end(),
                       [&](const PinRequest& scalar) { return scalar.segment == operand.segment; });
  });
}

bool Substitution::has_paged_operand() const {
  return std::any_of(operands.begin(), operands.end(), [](const Operand& o) { return o.segment; });
}

}  // namespace zeropage
