// Operators of the device: the CPU's, on shadows of the tensors, on the thread of a stream.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>

#include "device.h"

namespace sim {
namespace {

using Stack = torch::jit::Stack;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

void copy_marks(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

/// The same elements as a tensor of the CPU, for the thread of a stream alone. It keeps nothing alive.
at::Tensor shadow_of(const at::Tensor& tensor) {
  auto* const data = static_cast<char*>(shadow(tensor.storage().mutable_data()));
  const auto offset = data ? tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize()) : 0;
  at::Tensor made = at::from_blob(
      data + offset, tensor.sizes(), tensor.strides(), [](void*) {}, at::TensorOptions().dtype(tensor.dtype()));
  copy_marks(tensor, made);
  return made;
}

/// A tensor that a stream's thread may use later: a shadow of device memory, or a copy of a host tensor.
at::Tensor for_stream(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  at::Tensor made = on_device(tensor) ? shadow_of(tensor) : tensor.detach().clone();
  if (!on_device(tensor)) copy_marks(tensor, made);
  return made;
}

/// Sizes and strides alone.
at::Tensor without_data(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  at::Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  copy_marks(tensor, made);
  return made;
}

template <class Each>
c10::IValue convert(const c10::IValue& value, c10::DeviceType target, Each each) {
  if (value.isTensor()) return each(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(each(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(each(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(target);
  if (value.isGenerator()) return drawing(value.toGenerator());
  return value;
}

struct Traits {
  mutable std::atomic<bool> synchronous = false;  // the host must know what comes out
  int generator = -1;                             // which argument
  std::vector<int> returned;                      // by return: the argument that it is, or -1: made anew
  std::vector<int> out;                           // arguments that are resized to the result
};

/// The CPU's norms of layers and groups keep them in the input's dtype, unless weights are wider; others in float32.
std::optional<c10::ScalarType> dtype_of_statistics(const std::string& name, const Stack& arguments) {
  const bool layers = name == "aten::native_layer_norm";
  if (!layers && name != "aten::native_group_norm") return std::nullopt;
  const c10::IValue& weight = arguments[layers ? 2 : 1];
  const c10::ScalarType of_input = arguments[0].toTensor().scalar_type();
  return weight.isTensor() && weight.toTensor().defined()
             ? c10::promoteTypes(of_input, weight.toTensor().scalar_type())
             : of_input;
}

const Traits& traits_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* const known = new std::unordered_map<std::string, Traits>;
  std::lock_guard lock(mutex);
  const auto [found, is_new] = known->try_emplace(c10::toString(op.operator_name()));
  Traits& traits = found->second;
  if (!is_new) return traits;
  const auto& schema = op.schema();
  traits.synchronous = op.hasTag(at::Tag::nondeterministic_seeded) || op.hasTag(at::Tag::dynamic_output_shape) ||
                       op.hasTag(at::Tag::data_dependent_output) || schema.name() == "aten::native_batch_norm";
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.name() == "generator") traits.generator = static_cast<int>(i);
    if (argument.is_out()) traits.out.push_back(static_cast<int>(i));
  }
  if (traits.generator >= 0) traits.synchronous = true;
  for (const auto& result : schema.returns()) {
    int which = -1;
    for (std::size_t i = 0; result.alias_info() && i < schema.arguments().size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) which = static_cast<int>(i);
    }
    traits.returned.push_back(which);
    const auto kind = result.type()->kind();
    const bool tensors = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
    if (which < 0 && !tensors) traits.synchronous = true;
  }
  return traits;
}

at::Tensor like(const at::Tensor& made) {
  if (!made.defined()) return made;
  at::Tensor tensor = at::empty_strided(made.sizes(), made.strides(), at::TensorOptions(kDevice).dtype(made.dtype()));
  copy_marks(made, tensor);
  return tensor;
}

/// Tensors of the device in the shape of what was made elsewhere.
c10::IValue like(const c10::IValue& made) {
  return convert(made, kType, [](const at::Tensor& tensor) { return like(tensor); });
}

void copy_all(const c10::IValue& to, const c10::IValue& from) {
  if (to.isTensor()) {
    if (to.toTensor().defined()) to.toTensor().copy_(from.toTensor());
  } else if (to.isTensorList()) {
    const auto into = to.toTensorVector(), made = from.toTensorVector();
    for (std::size_t i = 0; i < into.size(); ++i) into[i].copy_(made[i]);
  }
}

Stack converted(const Stack& stack, std::size_t count, c10::DeviceType target,
                at::Tensor (*each)(const at::Tensor&)) {
  Stack made;
  made.reserve(count);
  for (std::size_t i = stack.size() - count; i < stack.size(); ++i) made.push_back(convert(stack[i], target, each));
  return made;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

/// The operator's results as tensors without data, or nothing if the meta kernel fails.
std::optional<Stack> foretell(const c10::OperatorHandle& op, const Stack& stack, std::size_t count) {
  try {
    Stack meta = converted(stack, count, c10::kMeta, &without_data);
    const auto statistics = dtype_of_statistics(op.schema().name(), meta);
    call(op, meta);
    for (std::size_t i = 1; statistics && i < meta.size(); ++i) meta[i] = meta[i].toTensor().to(*statistics);
    return meta;
  } catch (const std::exception&) {  // the CPU's kernel will say it better
    return std::nullopt;
  }
}

void resize_outputs(const Traits& traits, const Stack& made, const Stack& stack, std::size_t first) {
  for (std::size_t i = 0; i < traits.returned.size(); ++i) {
    const int which = traits.returned[i];
    if (std::find(traits.out.begin(), traits.out.end(), which) == traits.out.end()) continue;
    if (!made[i].isTensor() || !made[i].toTensor().defined()) continue;
    at::native::resize_output(stack[first + which].toTensor(), made[i].toTensor().sizes());
  }
}

void return_results(const Traits& traits, std::vector<c10::IValue> results, Stack& stack, std::size_t count) {
  std::vector<c10::IValue> returned;
  for (std::size_t i = 0; i < traits.returned.size(); ++i) {
    const int which = traits.returned[i];
    returned.push_back(which < 0 ? std::move(results[i]) : stack[stack.size() - count + which]);
  }
  torch::jit::drop(stack, count);
  for (c10::IValue& value : returned) stack.push_back(std::move(value));
}

/// On this thread, after all that its stream was asked for.
void run_now(const c10::OperatorHandle& op, const Traits& traits, Stack& stack, std::size_t count) {
  ++statistics().synchronous_operators;
  current_queue().finish();
  const std::size_t first = stack.size() - count;
  Stack host = converted(stack, count, c10::kCPU, &for_stream);
  for (const int which : traits.out) {  // a shadow cannot be resized
    if (host[which].isTensor()) host[which] = at::empty({0}, host[which].toTensor().options());
  }
  if (traits.generator >= 0 && host[traits.generator].isNone()) host[traits.generator] = drawing({});
  std::optional<at::Generator> displaced;  // an operator that takes no generator draws from the CPU's
  const bool draws = traits.generator < 0 && op.hasTag(at::Tag::nondeterministic_seeded);
  const at::Generator& cpu = at::detail::getDefaultCPUGenerator();
  if (draws) {
    displaced = cpu.clone();
    cpu.unsafeGetGeneratorImpl()->set_state(*drawing({}).get_state().unsafeGetTensorImpl());
  }
  call(op, host);
  if (draws) {
    drawing({}).unsafeGetGeneratorImpl()->set_state(*cpu.get_state().unsafeGetTensorImpl());
    cpu.unsafeGetGeneratorImpl()->set_state(*displaced->get_state().unsafeGetTensorImpl());
  }
  resize_outputs(traits, host, stack, first);
  std::vector<c10::IValue> results;
  for (std::size_t i = 0; i < traits.returned.size(); ++i) {
    const int which = traits.returned[i];
    const bool is_out = std::find(traits.out.begin(), traits.out.end(), which) != traits.out.end();
    results.push_back(which < 0 ? like(host[i]) : c10::IValue());
    const c10::IValue& into = is_out ? stack[first + which] : results.back();
    if (which < 0 || is_out) copy_all(convert(into, c10::kCPU, &for_stream), host[i]);
  }
  return_results(traits, std::move(results), stack, count);
}

/// Refuses host tensors as a GPU's operators do, except indices and numbers.
void refuse_host_tensors(const c10::OperatorHandle& op, const Stack& stack, std::size_t count) {
  const std::string& name = op.schema().name();
  if (name.find("index") != std::string::npos) return;
  const auto check = [&](const at::Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || on_device(tensor) || tensor.dim() == 0, name,
                ": Expected all tensors to be on the same device, but found at least two devices, sim:0 and ",
                tensor.device(), "!");
  };
  for (std::size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isTensor()) check(stack[i].toTensor());
    if (stack[i].isTensorList()) {
      for (const at::Tensor& tensor : stack[i].toTensorVector()) check(tensor);
    }
  }
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Traits& traits = traits_of(op);
  const std::size_t count = op.schema().arguments().size(), first = stack->size() - count;
  refuse_host_tensors(op, *stack, count);
  ++statistics().operators;
  const bool makes = std::find(traits.returned.begin(), traits.returned.end(), -1) != traits.returned.end();
  if (traits.synchronous) return run_now(op, traits, *stack, count);
  std::optional<Stack> made;
  if (makes || !traits.out.empty()) {
    made = foretell(op, *stack, count);
    if (!made) {
      traits.synchronous = true;  // an exception takes far longer than any operator of a test
      return run_now(op, traits, *stack, count);
    }
    resize_outputs(traits, *made, *stack, first);
  }
  std::vector<c10::IValue> results(traits.returned.size()), shadows(traits.returned.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (traits.returned[i] >= 0) continue;
    results[i] = like((*made)[i]);
    shadows[i] = convert(results[i], c10::kCPU, &for_stream);
  }
  Stack host = converted(*stack, count, c10::kCPU, &for_stream);
  current_queue().push([op, host = std::move(host), shadows = std::move(shadows)]() mutable {
    call(op, host);
    for (std::size_t i = 0; i < shadows.size(); ++i) {
      if (shadows[i].isTensor() && shadows[i].toTensor().defined()) {
        const at::Tensor said = shadows[i].toTensor(), made = host[i].toTensor();
        TORCH_CHECK(said.sizes() == made.sizes() && said.dtype() == made.dtype(), op.operator_name(), " makes ",
                    made.dtype(), made.sizes(), ", not ", said.dtype(), said.sizes());
      }
      copy_all(shadows[i], host[i]);
    }
  });
  return_results(traits, std::move(results), *stack, count);
}

// --- what has no kernel on the CPU that could run on shadows ---

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// A tensor of the host as a stream's thread may use it while the host goes on: itself, if it is pinned.
at::Tensor reachable(const at::Tensor& host) {
  return at::from_blob(
      host.data_ptr(), host.sizes(), host.strides(), [](void*) {}, at::TensorOptions().dtype(host.dtype()));
}

/// Bytes from the first element to the end of the last.
std::size_t extent(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  Queue& queue = current_queue();
  if (on_device(from) && on_device(to)) {
    queue.push([to = shadow_of(to), from = shadow_of(from)] { to.copy_(from); });
    return to;
  }
  if (on_device(to)) {
    // The call reads unpinned memory before it returns. The stream reads pinned memory when it reaches the copy.
    const bool pinned = is_pinned(from.data_ptr(), extent(from));
    queue.push([to = shadow_of(to), from = pinned ? reachable(from) : from.detach().clone()] {
      cross_link(Way::upload, to.nbytes());
      to.copy_(from);
    });
    if (pinned && !non_blocking) queue.wait(queue.asked());
    return to;
  }
  const bool pinned = is_pinned(to.data_ptr(), extent(to));
  queue.push([to = reachable(to), from = shadow_of(from)] {
    cross_link(Way::download, from.nbytes());
    to.copy_(from);
  });
  if (!pinned || !non_blocking) {
    queue.finish();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  current_queue().finish();
  return at::_local_scalar_dense(shadow_of(tensor));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, tensor.itemsize(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  }
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) {
  const auto count = static_cast<std::int64_t>(source.nbytes() / tensor.itemsize());
  return at::native::set_storage_cpu_(tensor, std::move(source), 0, {count}, {});
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  at::Storage none(at::Storage::use_byte_size_t(), 0, device_allocator(), /*resizable=*/true);
  return at::native::set_storage_cpu_(tensor, std::move(none), 0, {0}, {});
}

/// The CPU counts floats alone.
at::Tensor histc(const at::Tensor& tensor, std::int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  Stack stack{tensor.to(at::kFloat), bins, least, most};
  run(op, {}, &stack);
  return stack[0].toTensor().to(tensor.scalar_type());
}

// Under these names PyTorch asks other devices for what it has kernels of its own for on the CPU.

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, std::int64_t groups) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Stack stack{input, weight, bias, stride.vec(), padding.vec(), dilation.vec(), transposed, output_padding.vec(),
              groups};
  run(op, {}, &stack);
  return stack[0].toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& input,
                                                                    const at::Tensor& weight, at::IntArrayRef stride,
                                                                    at::IntArrayRef padding, at::IntArrayRef dilation,
                                                                    bool transposed, at::IntArrayRef output_padding,
                                                                    std::int64_t groups, std::array<bool, 3> mask) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const std::vector<std::int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  Stack stack{grad,
              input,
              weight,
              bias,
              stride.vec(),
              padding.vec(),
              dilation.vec(),
              transposed,
              output_padding.vec(),
              groups,
              c10::List<bool>({mask[0], mask[1], mask[2]})};
  run(op, {}, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates,
                                                         const at::Tensor& hidden_gates, const at::Tensor& cx,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  const auto parts = gates.chunk(4, 1);
  const at::Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(),
                   out = parts[3].sigmoid();
  const at::Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& grad_hy,
                                                                  const std::optional<at::Tensor>& grad_cy,
                                                                  const at::Tensor& cx, const at::Tensor& cy,
                                                                  const at::Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const at::Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  const at::Tensor tanh_cy = cy.tanh();
  const at::Tensor of_hy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  at::Tensor of_cy = of_hy * out * (1 - tanh_cy * tanh_cy);
  if (grad_cy && grad_cy->defined()) of_cy = of_cy + *grad_cy;
  const at::Tensor gates = at::cat({of_cy * cell * in * (1 - in), of_cy * cx * forget * (1 - forget),
                                    of_cy * in * (1 - cell * cell), of_hy * tanh_cy * out * (1 - out)},
                                   1);
  return {gates, of_cy * forget, has_bias ? gates.sum(0) : at::Tensor()};
}

void record(at::Tensor& tensor, at::Stream stream) { record_stream(tensor.storage().data_ptr(), stream); }

/// The parts of PyTorch's own kernel; the fused ones are for devices that it knows.
std::int64_t attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                       double, bool, std::optional<double>, bool) {
  return 0;
}

}  // namespace
}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &sim::empty);
  library.impl("empty_strided", &sim::empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("view", &at::native::view);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &sim::resize);
  library.impl("_copy_from", &sim::copy_from);
  library.impl("_copy_from_and_resize", &sim::copy_from_and_resize);
  library.impl("_local_scalar_dense", &sim::local_scalar);
  library.impl("set_", &sim::set_nothing);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", &sim::set_storage);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("record_stream", &sim::record);
  library.impl("_fused_sdp_choice", &sim::attention);
  library.impl("histc", &sim::histc);
  // Else made of batch norm, whose statistics the host would have to wait for.
  for (const char* norm : {"native_layer_norm", "native_group_norm"}) {
    library.impl(norm, torch::CppFunction::makeFromBoxedFunction<&sim::run>());
  }
  library.impl("convolution_overrideable", &sim::convolution);
  library.impl("convolution_backward_overrideable", &sim::convolution_backward);
  library.impl("_thnn_fused_lstm_cell", &sim::lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &sim::lstm_cell_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FLOAT)
#undef FLOAT
#define CHOSEN(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(CHOSEN)
#undef CHOSEN
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(WIDEST)
#undef WIDEST
}
