#include "zeropage/rules/operator_info.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
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

bool is_number_type(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) return is_number_type(optional->getElementType());
  if (auto list = type->cast<c10::ListType>()) return is_number_type(list->getElementType());
  return type->kind() == c10::TypeKind::NumberType || type->kind() == c10::TypeKind::FloatType;
}

/// Operators that return views or their arguments although their schemas do not say so.
bool is_view_by_name(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "_unsafe_view", "atleast_1d",   "atleast_2d", "atleast_3d",  "broadcast_tensors",       "meshgrid",
      "unsafe_chunk", "unsafe_split", "type_as",    "sum_to_size", "unsafe_split_with_sizes",
  };
  return names.count(name) > 0;
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

/// Views whose kernels call only other views, which need not reach the fallback again.
bool is_made_of_views(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "t",        "numpy_T",    "mT",        "adjoint",   "transpose", "swapaxes", "swapdims", "permute",   "movedim",
      "moveaxis", "view_as",    "expand",    "expand_as", "select",    "slice",    "squeeze",  "unsqueeze", "chunk",
      "split",    "as_strided", "unflatten", "unbind",    "diagonal",  "detach",   "alias",    "view"};
  return names.count(name) > 0;
}

/// Operators that fill a tensor without reading its content. Other seeded operators, such as dropout_, read it.
bool fills_at_random(std::string_view name) {
  static const std::unordered_set<std::string_view> names{"bernoulli_", "random_",     "uniform_",   "normal_",
                                                          "cauchy_",    "log_normal_", "geometric_", "exponential_"};
  return names.count(name) > 0;
}

/// Operators that autograd never records.
bool has_no_derivative(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "isnan",       "isinf",       "isfinite",   "isposinf",   "isneginf", "signbit", "eq",    "ne",
      "lt",          "le",          "gt",         "ge",         "any",      "all",     "equal", "count_nonzero",
      "logical_not", "logical_and", "logical_or", "logical_xor"};
  return names.count(name) > 0;
}

/// Operators on lists that are elementwise, or reduce each tensor by itself, by their names without "_foreach_".
bool goes_by_elements(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "abs",   "acos", "add",        "addcdiv", "addcmul", "asin",    "atan", "ceil",    "clamp_max", "clamp_min",
      "clone", "copy", "cos",        "cosh",    "div",     "erf",     "erfc", "exp",     "expm1",     "floor",
      "frac",  "lerp", "lgamma",     "log",     "log10",   "log1p",   "log2", "maximum", "minimum",   "mul",
      "neg",   "pow",  "reciprocal", "round",   "rsqrt",   "sigmoid", "sign", "sin",     "sinh",      "sqrt",
      "sub",   "tan",  "tanh",       "trunc",   "zero",    "norm",    "max",  "powsum"};
  if (!name.empty() && name.back() == '_') name.remove_suffix(1);
  return names.count(name) > 0;
}

/// Arguments that a kernel writes although its schema does not say so: running statistics of normalisation.
bool writes_in_secret(const std::string& argument) { return argument == "running_mean" || argument == "running_var"; }

/// Activations whose CPU kernels divide their work differently, so that a page's edge could change a bit.
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
    info.numbers.push_back(is_number_type(argument.type()));
  }
  const bool is_functional = starts_with(schema.name(), "_c10d_functional");
  info.is_collective = (is_functional || starts_with(schema.name(), "c10d::")) && !schema.returns().empty();
  if (info.is_collective && !is_functional) info.writes[0] = true;  // no schema says so
  info.seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  if (is_view(schema) || is_view_by_name(name)) info.kind = OperatorKind::view;
  if (!aten && !ours) return info;
  info.moves = name == "to";
  info.is_constant = has_no_derivative(name);
  info.makes_sparse = makes_sparse(name);
  info.made_of_views = is_made_of_views(name);
  info.sets = name == "set_" || name == "set_data";
  info.cuts_by_content = name == "tensor_split" && schema.overload_name() == "tensor_indices_or_sections";
  if (asks_metadata(name)) info.kind = OperatorKind::metadata;
  info.fills = fills_at_random(name);
  info.fused = ours || starts_with(name, "_fused_adam") || starts_with(name, "_fused_sgd") ||
               starts_with(name, "_fused_adagrad");
  constexpr std::string_view kForeach = "_foreach_";
  info.list = info.fused || (starts_with(name, kForeach) && goes_by_elements(name.substr(kForeach.size())));
  const bool returns_tensor =
      schema.returns().size() == 1 && is_tensor_type(schema.returns()[0].type());  // not equal()
  info.pointwise =
      op.hasTag(at::Tag::pointwise) && returns_tensor && !info.seeded && !info.list && !cut_otherwise(name);
  info.rule = find_rule(std::string(name), schema.overload_name(), info);
  info.tile = find_tile_rule(std::string(name), schema.overload_name());
  return info;
}

}  // namespace

namespace {

/// A cache of operators' properties. [Note: addresses of operators] Its key is the address of the operator's name in
/// the dispatcher's entry. After a library is unloaded, another operator may get the address. The dispatcher
/// therefore notifies us, and every thread clears its cache.
class KnownOperators {
 public:
  static KnownOperators& instance() {
    static auto* known = new KnownOperators;
    return *known;
  }

  std::uint64_t unloads() const { return unloads_.load(std::memory_order_acquire); }

  const OperatorInfo& find(const c10::OperatorHandle& op) {
    OperatorInfo info = describe(op);
    std::lock_guard lock(mutex_);
    auto [place, is_new] = known_.try_emplace(&op.operator_name(), nullptr);
    if (is_new) place->second = &infos_.emplace_back(std::move(info));
    return *place->second;
  }

 private:
  struct Listener final : c10::OpRegistrationListener {
    explicit Listener(KnownOperators& known) : known_(known) {}
    void onOperatorRegistered(const c10::OperatorHandle&) override {}
    void onOperatorDeregistered(const c10::OperatorHandle& op) override { known_.forget(&op.operator_name()); }
    KnownOperators& known_;
  };

  KnownOperators()
      : registration_(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>(*this))) {}

  void forget(const void* key) {
    std::lock_guard lock(mutex_);
    known_.erase(key);
    unloads_.fetch_add(1, std::memory_order_release);
  }

  std::mutex mutex_;
  std::unordered_map<const void*, const OperatorInfo*> known_;
  std::deque<OperatorInfo> infos_;  // also of unloaded operators: a call may be under way
  std::atomic<std::uint64_t> unloads_ = 0;
  c10::RegistrationHandleRAII registration_;
};

}  // namespace

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  // [Note: addresses of operators]
  struct Known {
    std::uint64_t unloads = 0;
    struct Recent {
      const void* key = nullptr;
      const OperatorInfo* info = nullptr;
    };
    std::array<Recent, 128> recent;  // by address: two operators in use seldom share an entry
    std::unordered_map<const void*, const OperatorInfo*> all;
  };
  thread_local Known known;
  static auto& operators = KnownOperators::instance();
  if (const auto now = operators.unloads(); now != known.unloads) {
    known = Known();
    known.unloads = now;
  }
  const void* const key = &op.operator_name();
  auto& recent = known.recent[(reinterpret_cast<std::uintptr_t>(key) >> 6) % known.recent.size()];
  if (recent.key == key) return *recent.info;
  const OperatorInfo*& info = known.all[key];
  if (!info) info = &operators.find(op);
  recent = {key, info};
  return *info;
}

}  // namespace zeropage
