#include "zeropage/rules/call.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "zeropage/rules/rules.h"

namespace zeropage {
namespace {

bool is_tensor_type(const c10::TypePtr& type) {
  if (type->isSubtypeOf(*c10::TensorType::get())) return true;
  if (auto optional = type->cast<c10::OptionalType>()) return is_tensor_type(optional->getElementType());
  if (auto list = type->cast<c10::ListType>()) return is_tensor_type(list->getElementType());
  return false;
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (!result.alias_info() || result.alias_info()->isWrite()) return false;
  }
  return !schema.returns().empty();
}

bool starts_with(std::string_view text, std::string_view prefix) { return text.substr(0, prefix.size()) == prefix; }

bool asks_metadata(std::string_view name) {
  static const std::unordered_set<std::string_view> names{"result_type",
                                                          "is_same_size",
                                                          "_has_compatible_shallow_copy_type",
                                                          "size",
                                                          "stride",
                                                          "numel",
                                                          "dim",
                                                          "sym_size",
                                                          "sym_stride",
                                                          "sym_numel",
                                                          "sym_storage_offset",
                                                          "is_floating_point",
                                                          "is_complex",
                                                          "is_signed",
                                                          "is_pinned",
                                                          "empty_like",
                                                          "zeros_like",
                                                          "ones_like",
                                                          "full_like",
                                                          "rand_like",
                                                          "randn_like",
                                                          "new_empty",
                                                          "new_zeros",
                                                          "new_ones",
                                                          "new_full",
                                                          "new_empty_strided",
                                                          "can_cast"};
  return names.count(name) > 0;
}

/// Arguments that a kernel writes although its schema does not say so: the running statistics of normalisation.
bool writes_in_secret(const std::string& argument) { return argument == "running_mean" || argument == "running_var"; }

/// Activations whose CPU kernels cut their work in a way of their own, so that a page's edge could change a bit.
bool cut_otherwise(std::string_view name) { return starts_with(name, "gelu") || starts_with(name, "silu"); }

OperatorInfo describe(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  std::string_view name = schema.name();
  const bool aten = starts_with(name, "aten::");
  const bool ours = starts_with(name, "zeropage::_fused_");
  if (aten) name.remove_prefix(6);
  if (ours) name.remove_prefix(10);
  OperatorInfo info;
  for (const auto& argument : schema.arguments()) {
    const bool tensor = is_tensor_type(argument.type());
    info.takes_tensors |= tensor;
    info.writes.push_back((argument.alias_info() && argument.alias_info()->isWrite()) ||
                          (tensor && writes_in_secret(argument.name())));
  }
  if (is_view(schema)) info.kind = OperatorKind::view;
  if (!aten && !ours) return info;
  info.moves = name == "to";
  if (asks_metadata(name)) info.kind = OperatorKind::metadata;
  const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  const bool in_place = !info.writes.empty() && info.writes[0] && schema.returns().size() == 1;
  info.fills = random && in_place && name.back() == '_';
  info.fused = ours || starts_with(name, "_fused_adam") || starts_with(name, "_fused_sgd") ||
               starts_with(name, "_fused_adagrad");
  info.list = info.fused || starts_with(name, "_foreach_");
  const bool returns_tensor =
      schema.returns().size() == 1 && is_tensor_type(schema.returns()[0].type());  // not equal()
  info.pointwise = op.hasTag(at::Tag::pointwise) && returns_tensor && !random && !info.list && !cut_otherwise(name);
  info.rule = find_rule(std::string(name), schema.overload_name(), info);
  return info;
}

}  // namespace

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  // The name lives in the dispatcher's entry for the operator, so its address stands for the operator.
  thread_local std::unordered_map<const void*, const OperatorInfo*> known;
  const void* key = &op.operator_name();
  if (auto found = known.find(key); found != known.end()) return *found->second;
  static std::mutex mutex;
  static auto* all = new std::unordered_map<const void*, OperatorInfo>;
  std::lock_guard lock(mutex);
  const auto& info = all->try_emplace(key, describe(op)).first->second;
  known.emplace(key, &info);
  return info;
}

void Call::find_paged() {
  const auto see = [&](const at::Tensor& tensor, bool write) {
    if (auto* segment = segment_of(tensor)) paged.push_back({tensor, segment, write ? Access::write : Access::read});
  };
  for (std::size_t i = 0; i < arguments; ++i) {
    const c10::IValue& value = argument(i);
    if (value.isTensor()) {
      see(value.toTensor(), info.writes[i]);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (!element.isTensor()) break;
        see(element.toTensor(), info.writes[i]);
      }
    }
  }
}

bool Call::needs_autograd() {
  if (!c10::GradMode::is_enabled()) return false;
  for (std::size_t i = 0; i < arguments; ++i) {
    const c10::IValue& value = argument(i);
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad()) return true;
    if (value.isTensorList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.toTensor().defined() && element.toTensor().requires_grad()) return true;
      }
    }
  }
  return false;
}

bool Call::plain_modes() {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

namespace {

/// Autocast keeps its casts of leaves until it ends: of paged weights, all of them would stay in memory.
class NoCastCache {
 public:
  explicit NoCastCache(c10::DeviceType device)
      : switched_(at::autocast::is_autocast_enabled(device) && at::autocast::is_autocast_cache_enabled()) {
    if (switched_) at::autocast::set_autocast_cache_enabled(false);
  }
  ~NoCastCache() {
    if (switched_) at::autocast::set_autocast_cache_enabled(true);
  }
  NoCastCache(const NoCastCache&) = delete;
  NoCastCache& operator=(const NoCastCache&) = delete;

 private:
  bool switched_;
};

}  // namespace

void Call::run_whole() {
  c10::SmallVector<PinRequest, 8> requests;
  for (const PagedArgument& argument : paged) requests.push_back({argument.segment, argument.access});
  TensorPin pin(requests);
  {
    c10::impl::ExcludeDispatchKeyGuard guard(kPagedKey);
    const NoCastCache no_cache(paged[0].tensor.device().type());
    op.redispatchBoxed(below, &stack);
  }
  pin.release();
}

void call_below(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_us(c10::DispatchKeySet(kPagedKey) | c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace zeropage
