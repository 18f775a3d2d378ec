// _foreach_ and _fused_ operators. Element i of the lists is a call of its own, so run_list() handles one after
// another. It runs a tensor page by page if windows can, and otherwise loads the whole tensor.
#include "zeropage/rules/placement.h"
#include "zeropage/rules/pointwise.h"
#include "zeropage/rules/preview.h"
#include "zeropage/rules/program.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/stand_ins.h"

namespace zeropage {
namespace {

bool reduces(std::string_view name) {
  for (const char* word : {"norm", "max", "powsum"}) {
    if (name == std::string("aten::_foreach_") + word) return true;
  }
  return false;
}

/// The arguments of element i: a tensor for each tensor list, a scalar's share of each scalar list.
class Element {
 public:
  Element(Call& call, std::size_t index) : call_(call), index_(index) {}

  bool is_list(std::size_t argument) { return call_.argument(argument).isTensorList() && size_of(argument) > 0; }

  c10::IValue tensor_or_value(std::size_t argument) {
    const c10::IValue& value = call_.argument(argument);
    if (value.isTensorList()) return size_of(argument) > 0 ? value.toListRef()[index_] : value;
    if (value.isList()) return one_of(value);  // a list of numbers
    // addcdiv's `scalars` may be a tensor of one dimension, an element for each tensor of the lists.
    if (value.isTensor() && value.toTensor().defined() && call_.argument_name(argument) == "scalars") {
      return value.toTensor().narrow(0, static_cast<std::int64_t>(index_), 1);
    }
    return value;
  }

  std::size_t index() const { return index_; }

  std::size_t length() {
    for (std::size_t i = 0; i < call_.arguments; ++i) {
      if (call_.argument(i).isTensorList()) return size_of(i);
    }
    return 0;
  }

 private:
  std::size_t size_of(std::size_t argument) { return call_.argument(argument).toListRef().size(); }

  c10::IValue one_of(const c10::IValue& list) {
    c10::impl::GenericList one(list.toList().elementType());
    one.push_back(list.toListRef()[index_]);
    return one;
  }

  Call& call_;
  std::size_t index_;
};

Access access_of(Call& call, std::size_t argument) {
  if (!call.info.writes[argument]) return Access::read;
  if (call.info.fused && call.argument_name(argument) == "grads") {
    // Written only to store the unscaled values.
    for (std::size_t i = 0; i < call.arguments; ++i) {
      if (call.argument_name(i) == "grad_scale") return call.argument(i).isTensor() ? Access::write : Access::read;
    }
  }
  const bool overwrites = call.name() == "aten::_foreach_zero_" || call.name() == "aten::_foreach_copy_";
  return overwrites ? Access::overwrite : Access::write;
}

/// Runs the operator on lists of one, with the whole tensors of element i in memory.
c10::IValue run_element_whole(Call& call, Element& element) {
  torch::jit::Stack stack;
  for (std::size_t i = 0; i < call.arguments; ++i) {
    c10::IValue value = element.tensor_or_value(i);
    stack.push_back(element.is_list(i) ? c10::List<at::Tensor>({value.toTensor()}) : std::move(value));
  }
  Call one{call.op, call.info, call.below, stack, 0, call.arguments};
  one.find_paged();
  StandIns previews(one);
  if (reduces(call.name())) previews.replace(&can_be_previewed, &preview);
  c10::SmallVector<PinRequest, 8> requests;
  for (const PagedArgument& argument : one.paged) requests.push_back({argument.segment, argument.access});
  TensorPin pin(requests);
  call_below(call.op, stack);
  pin.release();
  return stack.empty() ? c10::IValue() : stack[0];
}

/// PyTorch's fused SGD on the CPU reads a two-byte momentum from a few elements further on, so its windows cannot end
/// inside a tensor. Its results for a tensor's last elements may depend on the memory behind them.
bool reads_further_on(Call& call, const at::Tensor& parameter) {
  return call.name() == "aten::_fused_sgd_" && parameter.is_cpu() && parameter.itemsize() < sizeof(float);
}

/// Runs one element. Returns its result, if the operator returns one.
at::Tensor run_element(Call& call, Element element, bool returns, OneCall& one_call) {
  const at::Tensor shape = element.tensor_or_value(0).isTensor() ? element.tensor_or_value(0).toTensor()
                                                                 : element.tensor_or_value(1).toTensor();
  Substitution substitution;
  bool cut = !reduces(call.name()) && !reads_further_on(call, shape) && shape.dim() > 0;
  int written = -1;
  for (std::size_t i = 0; cut && i < call.arguments; ++i) {
    const Access access = access_of(call, i);
    if (written < 0 && call.info.writes[i]) written = static_cast<int>(substitution.operands.size());
    cut = substitution.add(element.tensor_or_value(i), element.is_list(i), shape, access);
  }
  if (cut && substitution.has_paged_operand() && !substitution.writes_its_scalars() && (written >= 0) != returns) {
    const bool over_ranks = call.paged[0].segment->domain()->partition.ranks != nullptr;
    return run_pointwise_windows(call.op, substitution, written,
                                 call.info.fused ? Chunking::vectors : Chunking::iterator,
                                 returns && over_ranks ? placement_of(call, element.index()) : Placement::same);
  }
  c10::IValue result = run_element_whole(call, element);
  one_call.copies.clear();  // it may have written a scalar of the next elements
  return returns ? result.toTensorVector()[0] : at::Tensor();
}

bool has_paged_element(Call& call, std::size_t index) {
  for (std::size_t i = 0; i < call.arguments; ++i) {
    const c10::IValue& value = call.argument(i);
    if (value.isTensorList() && index < value.toListRef().size() && segment_of(value.toListRef()[index].toTensor())) {
      return true;
    }
  }
  return false;
}

/// Whether every list has an element for each of `length` tensors. A list of tensors may be empty.
bool lists_agree(Call& call, std::size_t length) {
  for (std::size_t i = 0; i < call.arguments; ++i) {
    const c10::IValue& value = call.argument(i);
    if (!value.isList()) {
      const bool scalars = call.argument_name(i) == "scalars" && value.isTensor() && value.toTensor().defined();
      if (scalars && (value.toTensor().dim() != 1 || value.toTensor().size(0) != static_cast<std::int64_t>(length))) {
        return false;
      }
      continue;
    }
    const std::size_t size = value.toListRef().size();
    const bool may_be_empty = value.isTensorList() && size == 0 && i > 0;
    if (size != length && !may_be_empty) return false;
  }
  return true;
}

}  // namespace

bool run_list(Call& call) {
  const auto& returns = call.op.schema().returns();
  if (call.needs_autograd() || !Call::plain_modes() || returns.size() > 1) return false;
  if (call.name() == "aten::_foreach_norm" && run_norms(call)) return true;
  const std::size_t length = Element(call, 0).length();
  if (length == 0 || !lists_agree(call, length)) return false;  // PyTorch throws its own error
  OneCall one_call;
  const bool has_result = returns.size() == 1;
  std::vector<at::Tensor> results(has_result ? length : 0);
  // Elements without a paged tensor also run one by one. A list without any paged tensor never reaches this rule.
  for (std::size_t i = 0; i < length; ++i) {
    Element element(call, i);
    at::Tensor result;
    if (has_paged_element(call, i)) {
      result = run_element(call, element, has_result, one_call);
    } else {
      c10::IValue plain = run_element_whole(call, element);
      one_call.copies.clear();
      if (has_result) result = plain.toTensorVector()[0];
    }
    if (has_result) results[i] = std::move(result);
  }
  for (std::size_t i = 0; i < call.arguments && !call.info.fused; ++i) {  // PyTorch's fused operators bump no version
    if (!call.info.writes[i] || !call.argument(i).isTensorList()) continue;
    for (const c10::IValue& tensor : call.argument(i).toListRef()) bump_version(tensor.toTensor());
  }
  has_result ? call.return_value(std::move(results)) : call.return_nothing();
  return true;
}

}  // namespace zeropage
