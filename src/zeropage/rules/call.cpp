#include "zeropage/rules/call.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "zeropage/base/clock.h"
#include "zeropage/base/errors.h"
#include "zeropage/rules/lazy_product.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/shared_casts.h"

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

void Call::find_paged() {
  const auto see = [&](const at::Tensor& tensor, bool write) {
    if (auto* segment = segment_of(tensor)) {
      paged.push_back({tensor, segment, write ? Access::write : Access::read});
      may_tile |= !segment->is_always_in_memory() || segment->bytes() > segment->domain()->tile_above;
      if (write) segment->note_write();
    } else if (LazyProduct::of(tensor)) {
      has_lazy = true;
    }
  };
  for (std::size_t i = 0; i < arguments; ++i) {
    const c10::IValue& value = argument(i);
    if (value.isTensor()) {
      see(value.toTensor(), info.writes[i]);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) see(element.toTensor(), info.writes[i]);
      }
    }
  }
}

bool Call::needs_autograd() {
  if (info.is_constant) return false;
  const bool records = c10::GradMode::is_enabled();
  const auto is_seen = [&](const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return false;
    const at::Tensor& tensor = value.toTensor();
    if (records && tensor.requires_grad()) return true;
    return has_tangent(tensor);
  };
  for (std::size_t i = 0; i < arguments; ++i) {
    const c10::IValue& value = argument(i);
    if (is_seen(value)) return true;
    if (!value.isList()) continue;
    const auto list = value.toListRef();
    if (std::any_of(list.begin(), list.end(), is_seen)) return true;
  }
  return false;
}

bool Call::plain_modes() {
  // In a planned run the active mode is the planner's, which counts operators and changes none.
  const bool is_planned = VirtualClock::current() != nullptr;
  return (is_planned || !c10::impl::TorchDispatchModeTLS::any_modes_set()) &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

OutsideModes::OutsideModes()
    : guard_(c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
           c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})) {}

bool autocasts_on(c10::DeviceType device) {
  return device != c10::kMeta && at::autocast::is_autocast_enabled(device);
}

bool autocasts(const c10::OperatorHandle& op, c10::DeviceType device) {
  return autocasts_on(device) &&
         op.hasKernelForDispatchKey(at::autocast::get_autocast_dispatch_key_from_device_type(device));
}

namespace {

/// Switches autocast's cache off. It keeps casts of leaves until autocast ends, so all paged weights would stay in
/// memory.
class NoCastCache {
 public:
  explicit NoCastCache(bool is_autocast) : switched_(is_autocast && at::autocast::is_autocast_cache_enabled()) {
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

namespace {

/// [Note: sizes] An operator with an `out=` of another size first sets the tensor's new size, and then enlarges the
/// storage. A paged storage cannot grow, so the operator throws, and the tensor would reach beyond its storage.
/// WrittenShapes therefore restores the sizes of all outputs.
class WrittenShapes {
 public:
  explicit WrittenShapes(const Call& call) {
    for (const PagedArgument& argument : call.paged) {
      if (argument.access == Access::read) continue;
      const at::Tensor& tensor = argument.tensor;
      shapes_.push_back({&tensor, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()});
    }
  }
  void put_back() const {
    for (const Shape& shape : shapes_) {
      shape.tensor->unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides, shape.offset);
    }
  }

 private:
  struct Shape {
    const at::Tensor* tensor;
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset;
  };
  c10::SmallVector<Shape, 2> shapes_;
};

bool asks_for_larger_storage(const c10::Error& error) {
  return std::string_view(error.what_without_backtrace()).find("storage that is not resizable") !=
         std::string_view::npos;
}

/// Versions of the arguments that an operator declares as only read.
class ReadVersions {
 public:
  explicit ReadVersions(const Call& call) {
    for (const PagedArgument& argument : call.paged) {
      if (argument.access == Access::read && !argument.tensor.is_inference()) {
        read_.push_back({&argument, argument.tensor._version()});
      }
    }
  }
  /// The arguments that it wrote nevertheless. Call it while they are pinned.
  c10::SmallVector<PinRequest, 8> written() const {
    c10::SmallVector<PinRequest, 8> requests;
    for (const auto& [argument, version] : read_) {
      if (argument->tensor._version() != version) requests.push_back({argument->segment, Access::write});
    }
    return requests;
  }

 private:
  c10::SmallVector<std::pair<const PagedArgument*, std::int64_t>, 8> read_;
};

}  // namespace

void Call::redispatch() {
  const WrittenShapes shapes(*this);
  try {
    op.redispatchBoxed(below, &stack);
  } catch (const c10::Error& error) {
    if (!asks_for_larger_storage(error)) throw;
    shapes.put_back();
    throw AccessError(
        "a paged tensor keeps the size it was made with, but this operator would make it larger; give out= a tensor "
        "of the result's shape, or use an ordinary tensor");
  }
}

void Call::run_whole() {
  c10::SmallVector<PinRequest, 8> requests;
  for (const PagedArgument& argument : paged) requests.push_back({argument.segment, argument.access});
  TensorPin pin = [&] {
    RECORD_FUNCTION("zeropage::pin", c10::ArrayRef<const c10::IValue>{});  // shows faults in torch.profiler
    return TensorPin(requests);
  }();
  const ReadVersions versions(*this);
  const bool is_autocast = autocasts(paged[0].tensor);
  const SharedCasts casts(*this, is_autocast);
  {
    c10::impl::ExcludeDispatchKeyGuard guard(kPagedKey);
    const NoCastCache no_cache(is_autocast);
    redispatch();
  }
  casts.share(*this);
  if (const auto written = versions.written(); !written.empty()) {
    for (const PinRequest& request : written) undeclared.push_back(static_cast<StorageSegment*>(request.segment));
    TensorPin(written).release();
  }
  pin.release();
}

void call_below(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_us(c10::DispatchKeySet(kPagedKey) | c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

std::int64_t version_of(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_inference() ? 0 : tensor._version();
}

bool has_tangent(const at::Tensor& tensor) {
  return torch::autograd::impl::get_autograd_meta(tensor) && tensor._fw_grad(/*level=*/0).defined();
}

void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace zeropage
