#include "zeropage/rules/instruction.h"

#include <string_view>
#include <unordered_map>
#include <utility>

namespace zeropage {
namespace {

using Kind = Instruction::Kind;

/// The operator's name without its library and without "_foreach_".
std::string_view base_name(const c10::OperatorHandle& op) {
  std::string_view name = op.schema().name();
  for (std::string_view prefix : {"aten::", "zeropage::", "_foreach_"}) {
    if (name.substr(0, prefix.size()) == prefix) name.remove_prefix(prefix.size());
  }
  return name;
}

std::optional<kernels::Rule> rule_of(std::string_view name) {
  static const std::unordered_map<std::string_view, kernels::Rule> rules{
      {"_fused_adam_", kernels::Rule::adam}, {"_fused_adamw_", kernels::Rule::adamw},
      {"_fused_sgd_", kernels::Rule::sgd},   {"_fused_adagrad_", kernels::Rule::adagrad},
      {"_fused_lion_", kernels::Rule::lion},
  };
  const auto found = rules.find(name);
  return found == rules.end() ? std::nullopt : std::optional(found->second);
}

Kind kind_of(const Instruction& instruction) {
  static const std::unordered_map<std::string_view, Kind> kinds{
      {"mul_", Kind::scale},
      {"div_", Kind::scale},
      {"copy_", Kind::copy},
      {"zero_", Kind::zero},
      {"widen", Kind::widen},
      {"join_hi_lo", Kind::join_hi_lo},
      {"split_hi_lo_", Kind::split_hi_lo},
      {"decode", Kind::decode},
      {"encode_", Kind::encode},
  };
  if (instruction.rule) return Kind::update;
  const auto found = kinds.find(base_name(instruction.op));
  if (found == kinds.end()) return Kind::other;
  const bool rounds = instruction.op.schema().overload_name().find("_mode") != std::string::npos;
  if (found->second == Kind::scale && (rounds || instruction.slots.size() != 1)) return Kind::other;
  if (found->second == Kind::copy && instruction.slots.size() != 2) return Kind::other;
  if (found->second == Kind::zero && instruction.slots.size() != 1) return Kind::other;
  return found->second;
}

c10::SmallVector<bool, 8> writes_of(const Instruction& instruction) {
  const OperatorInfo& info = info_of(instruction.op);
  const auto& arguments = instruction.op.schema().arguments();
  c10::SmallVector<bool, 8> writes(instruction.slots.size(), false);
  // A fused operator writes its gradient only to store the unscaled values.
  const int scale = instruction.argument("grad_scale");
  const bool stores_gradient = scale >= 0 && instruction.call.arguments[scale].isTensor();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const int operand = instruction.call.operand_of[i];
    if (operand < 0 || !info.writes[i]) continue;
    if (info.fused && arguments[i].name() == "grads" && !stores_gradient) continue;
    writes[operand] = true;
  }
  return writes;
}

}  // namespace

Instruction::Instruction(c10::OperatorHandle op, Substitution call, c10::SmallVector<int, 8> slots, int result,
                         std::vector<HostCopy> in_host)
    : op(std::move(op)),
      call(std::move(call)),
      slots(std::move(slots)),
      result(result),
      in_host(std::move(in_host)),
      rule(rule_of(base_name(this->op))) {
  kind = kind_of(*this);
  writes = writes_of(*this);
}

bool Instruction::divides() const { return base_name(op) == "div_"; }

int Instruction::argument(std::string_view name) const {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return static_cast<int>(i);
  }
  return -1;
}

int Instruction::slot(std::string_view name) const {
  const int i = argument(name);
  const int operand = i < 0 ? -1 : call.operand_of[i];
  return operand < 0 ? -1 : slots[operand];
}

}  // namespace zeropage
