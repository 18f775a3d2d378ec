#include "zeropage/rules/probe.h"

#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <unordered_map>

namespace zeropage {
namespace {

at::Tensor first_result(const torch::jit::Stack& stack) {
  if (stack.empty()) return at::ones({1});
  return stack[0].isTensor() ? stack[0].toTensor() : stack[0].toTensorVector()[0];
}

/// Runs the operator on two elements: kernels have other checks for one. Returns the dtype that promotion gives, or
/// throws the call's error. A mode of the program, such as one that counts operators, does not see it.
caffe2::TypeMeta run_on_two(const c10::OperatorHandle& op, const Substitution& call) {
  c10::impl::ExcludeDispatchKeyGuard ordinary(
      kPagedKeys | c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  std::vector<at::Tensor> probes;
  for (const Operand& operand : call.operands) probes.push_back(at::ones({2}, operand.tensor.options()));
  auto stack = call.stack(probes);
  call_below(op, stack);
  return first_result(stack).dtype();
}

/// A character for the range of a number: its sign, and the dtypes that hold it.
char range_of(double number) {
  constexpr double kHalf = 65504, kBFloat16 = 0x1.FEp127, kFloat = std::numeric_limits<float>::max();
  if (std::isnan(number)) return 'n';
  const double size = std::abs(number);
  if (size > kHalf) {
    const int wide = std::isinf(size) ? 3 : size > kFloat ? 2 : size > kBFloat16 ? 1 : 0;
    return static_cast<char>((number < 0 ? 'a' : 'e') + wide);
  }
  return number < 0 ? '-' : number == 0 ? '0' : number <= 1 ? '1' : '+';
}

/// Adds the kind of an argument that is no tensor, and the range of a number: an operator may refuse either. A step's
/// numbers change but stay within their range.
void add_kind(std::string& signature, const c10::IValue& value) {
  signature += value.tagKind();
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) add_kind(signature, element);
  } else if (value.isBool()) {
    signature += value.toBool() ? '1' : '0';
  } else if (value.isInt() || value.isDouble()) {
    signature += range_of(value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble());
  } else if (value.isComplexDouble()) {
    signature += range_of(value.toComplexDouble().real());
    signature += range_of(value.toComplexDouble().imag());
  }
}

/// A key of everything that decides the result of run_on_two(). None if it has integer tensors, whose values decide
/// too.
std::optional<std::string> signature_of(const c10::OperatorHandle& op, const Substitution& call) {
  std::string signature = fmt::format("{}.{}", op.schema().name(), op.schema().overload_name());
  const auto add_tensor = [&](const at::Tensor& tensor) {
    fmt::format_to(std::back_inserter(signature), " {}{}{}", static_cast<int>(tensor.scalar_type()),
                   static_cast<int>(tensor.device().type()), tensor.unsafeGetTensorImpl()->is_wrapped_number());
  };
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const int operand = call.operand_of[i];
    const c10::IValue& value = call.arguments[i];
    if (operand >= 0) {
      const at::Tensor& tensor = call.operands[operand].tensor;
      signature += " of";  // an operand promotes differently than a tensor of no dimension
      if (!tensor.is_floating_point() && !tensor.is_complex()) return std::nullopt;
      add_tensor(tensor);
    } else if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& tensor = value.toTensor();
      add_tensor(tensor);
      // On the CPU, a fused update that is skipped checks none of its arguments.
      const bool skips = tensor.is_cpu() && op.schema().arguments()[i].name() == "found_inf";
      if (skips) signature += tensor.item<float>() == 1 ? '1' : '0';
    } else if (value.isString()) {
      fmt::format_to(std::back_inserter(signature), " {}", value.toStringRef());
    } else if (value.isList() || value.isTensor() || value.isNone() || value.isScalar()) {
      add_kind(signature += ' ', value);
    } else {
      return std::nullopt;
    }
  }
  return signature;
}

}  // namespace

caffe2::TypeMeta probe(const c10::OperatorHandle& op, const Substitution& call, bool is_cached) {
  thread_local std::unordered_map<std::string, caffe2::TypeMeta> known;
  const auto signature = is_cached ? signature_of(op, call) : std::nullopt;
  if (signature) {
    if (const auto found = known.find(*signature); found != known.end()) return found->second;
  }
  const caffe2::TypeMeta dtype = run_on_two(op, call);
  constexpr std::size_t kMost = 1024;
  if (known.size() >= kMost) known.clear();
  if (signature) known.emplace(*signature, dtype);
  return dtype;
}

}  // namespace zeropage
