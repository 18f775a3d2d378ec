#include "zeropage/rules/quantised.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "zeropage/kernels/update.h"
#include "zeropage/rules/program.h"
#include "zeropage/rules/stand_ins.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

// --- on ordinary tensors, for a program's instructions on its pieces ---

kernels::Array array_of(const at::Tensor& codes, const std::optional<at::Tensor>& scales, bool is_signed,
                        std::int64_t seed = 0) {
  return {format_of_codes(scales.has_value(), is_signed), codes.mutable_data_ptr(),
          scales ? scales->mutable_data_ptr() : nullptr, static_cast<std::uint32_t>(seed)};
}

at::Tensor decode_ordinary(const at::Tensor& codes, const std::optional<at::Tensor>& scales, bool is_signed) {
  if (!codes.is_cpu()) {  // seldom: the host has no room for the pages
    return decode_ordinary(codes.cpu(), scales ? std::optional(scales->cpu()) : scales, is_signed).to(codes.device());
  }
  at::Tensor value = at::empty(codes.sizes(), codes.options().dtype(at::kFloat));
  kernels::decode(array_of(codes, scales, is_signed), 0, codes.numel(), value.mutable_data_ptr<float>());
  return value;
}

at::Tensor& encode_ordinary(at::Tensor& codes, const std::optional<at::Tensor>& scales, const at::Tensor& value,
                            bool is_signed, std::int64_t seed) {
  if (!codes.is_cpu()) {
    at::Tensor on_cpu = codes.cpu();
    const auto scales_on_cpu = scales ? std::optional(scales->cpu()) : scales;
    encode_ordinary(on_cpu, scales_on_cpu, value.cpu(), is_signed, seed);
    if (scales) scales->copy_(*scales_on_cpu);
    return codes.copy_(on_cpu);
  }
  kernels::encode(array_of(codes, scales, is_signed, seed), 0, codes.numel(), value.const_data_ptr<float>());
  return codes;
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void add_codes(Substitution& call, const Quantisation& quantisation, const at::Tensor& shape, Access access) {
  call.add(quantisation.codes, false, shape, access);
  quantisation.scales.defined() ? call.add_blocks(quantisation.scales, access)
                                : void(call.add(c10::IValue(), false, shape, access));
}

Where where_of(const at::Tensor& tensor) {
  return segment_of(tensor)->domain()->updates_in_host ? Where::in_host : Where::on_device;
}

/// Windows for fused optimizers contain whole blocks.
constexpr Chunking kChunking = Chunking::vectors;

at::Tensor decode(const at::Tensor& quantised) {
  const c10::NoGradGuard no_grad;
  static const auto op = operator_named("zeropage::decode");
  const Quantisation& quantisation = *segment_of(quantised)->quantisation();
  Substitution call;
  add_codes(call, quantisation, quantisation.codes, Access::read);
  call.add(quantisation.is_signed, false, quantisation.codes, Access::read);
  if (auto value = defer(op, call, kChunking, caffe2::TypeMeta::Make<float>())) return *value;
  at::Tensor value =
      make_paged(segment_of(quantised)->domain(), quantisation.codes.sizes(), quantisation.codes.strides(),
                 caffe2::TypeMeta::Make<float>(), Role::optimizer, {.like = segment_of(quantised)});
  c10::SmallVector<Operand, 8> operands(call.operands.begin(), call.operands.end());
  operands.push_back({value, segment_of(value), Access::overwrite});
  for_each_window(
      operands, kChunking,
      [&](c10::ArrayRef<at::Tensor> slices) {
        auto stack = call.stack(slices.slice(0, slices.size() - 1));
        call_below(op, stack);
        slices.back().copy_(stack[0].toTensor());
      },
      nullptr, where_of(value));
  return value;
}

void encode(Quantisation& quantisation, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  static const auto op = operator_named("zeropage::encode_");
  Substitution call;
  add_codes(call, quantisation, quantisation.codes, Access::overwrite);
  call.add(value, false, quantisation.codes, Access::read);
  call.add(quantisation.is_signed, false, quantisation.codes, Access::read);
  call.add(static_cast<std::int64_t>(++quantisation.seed), false, quantisation.codes, Access::read);
  if (has_program(segment_of(value)) && defer(op, call, kChunking, std::nullopt)) return;
  for_each_window(
      call.operands, kChunking,
      [&](c10::ArrayRef<at::Tensor> slices) {
        auto stack = call.stack(slices);
        call_below(op, stack);
      },
      nullptr, where_of(quantisation.codes));
}

/// Whether the values of a fused optimizer's moment have signs; nullopt if the argument is no moment.
std::optional<bool> is_signed_moment(const std::string& argument) {
  if (argument == "exp_avgs" || argument == "momentum_buffer_list") return true;
  if (argument == "exp_avg_sqs") return false;
  return std::nullopt;
}

/// Replaces the content of `moment` by codes, in place.
void quantise(at::Tensor moment, bool is_signed) {
  const auto* segment = segment_of(moment);
  const auto& domain = segment->domain();
  const bool blocks = domain->moments == Moments::blocks8;
  // Tensors that share a page cannot be updated in a device's host, nor early.
  const bool alone = domain->updates_in_host || domain->early_update != EarlyUpdate::never;
  const auto like = [&](c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype, bool unallocated) {
    return make_paged(domain, sizes, strides, c10::scalarTypeToTypeMeta(dtype), Role::optimizer,
                      {.like = segment, .unallocated = unallocated, .alone = alone});
  };
  auto quantisation = std::make_unique<Quantisation>();
  quantisation->is_signed = is_signed;
  quantisation->codes = like(moment.sizes(), moment.strides(), blocks ? c10::kByte : c10::kBFloat16, false);
  if (blocks) {
    const bool is_share = segment_of(quantisation->codes)->is_partitioned();
    const std::size_t elements = is_share ? segment->stripes().share() : segment->elements();
    quantisation->scales =
        make_paged(domain, ceil_div(elements, kernels::kQuantum), 1, caffe2::TypeMeta::Make<float>(), Role::optimizer,
                   {.alone = alone, .is_local = true});
    segment_of(quantisation->scales)->is_of_share = is_share;
  }
  quantisation->seed = ++domain->quantisations * 0x9e3779b9u;
  encode(*quantisation, moment);
  at::Tensor quantised = like(moment.sizes(), moment.strides(), c10::kFloat, /*unallocated=*/true);
  segment_of(quantised)->set_quantisation(std::move(quantisation));
  moment.set_data(quantised);
}

bool can_be_quantised(const at::Tensor& moment) {
  const auto* segment = segment_of(moment);
  if (!segment || segment->quantisation() || segment->domain()->moments == Moments::as_they_are) return false;
  // On a device, small tensors stay resident, are updated there, and keep float32 moments.
  const bool is_small = !moment.is_cpu() && segment->domain()->keeps_whole(segment->elements());
  return moment.scalar_type() == c10::kFloat && is_whole(moment) && !is_small;
}

/// Seeds a fused optimizer's roundings by its step count, so that a resumed run rounds like an uninterrupted one. The
/// seed grows by one in each step, so that early updates can guess it. Without a step count, each encoding adds one.
/// If the count is on a device, it is read once, and each encoding adds one from there.
void seed_by_step(Call& call) {
  std::optional<c10::IValue> steps;
  for (std::size_t i = 0; i < call.arguments; ++i) {
    if (call.argument_name(i) == "state_steps" && call.argument(i).isTensorList()) steps = call.argument(i);
  }
  if (!steps) return;
  const auto counted = steps->toListRef();
  for (std::size_t i = 0; i < call.arguments; ++i) {
    const auto is_signed = is_signed_moment(call.argument_name(i));
    if (!is_signed || !call.argument(i).isTensorList()) continue;
    const auto moments = call.argument(i).toListRef();
    for (std::size_t j = 0; j < std::min(moments.size(), counted.size()); ++j) {
      const auto* segment = segment_of(moments[j].toTensor());
      const at::Tensor& step = counted[j].toTensor();
      if (!segment || !segment->quantisation() || segment_of(step)) continue;
      if (std::exchange(segment->quantisation()->is_seeded, true) && !step.is_cpu()) continue;
      const auto place = static_cast<std::uint32_t>(2 * j + (*is_signed ? 1 : 0) + 1);
      segment->quantisation()->seed = place * 0x9e3779b9u + static_cast<std::uint32_t>(step.item<double>());
    }
  }
}

}  // namespace

void quantise_moments(Call& call) {
  c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < call.arguments; ++i) {
    const auto is_signed = is_signed_moment(call.argument_name(i));
    if (!is_signed || !call.argument(i).isTensorList()) continue;
    for (const c10::IValue& element : call.argument(i).toListRef()) {
      if (can_be_quantised(element.toTensor())) quantise(element.toTensor(), *is_signed);
    }
  }
  seed_by_step(call);
  call.paged.clear();
  call.find_paged();
}

void quantise_moment(const at::Tensor& moment, const std::string& name) {
  c10::NoGradGuard no_grad;
  const bool is_signed = name == "exp_avg" || name == "momentum_buffer";
  if ((is_signed || name == "exp_avg_sq") && can_be_quantised(moment)) quantise(moment, is_signed);
}

bool takes_quantised(const Call& call) {
  if (call.info.kind != OperatorKind::data) return false;
  return std::any_of(call.paged.begin(), call.paged.end(),
                     [](const PagedArgument& argument) { return argument.segment->quantisation() != nullptr; });
}

void run_dequantised(Call& call, c10::function_ref<void(Call&)> run) {
  StandIns values(call);
  const auto seen_as = [](const at::Tensor& value, c10::ScalarType dtype) {
    return value.scalar_type() == dtype ? value : value.view(dtype);
  };
  values.replace([](const at::Tensor& tensor, bool) { return segment_of(tensor)->quantisation() != nullptr; },
                 [&](const at::Tensor& tensor) { return seen_as(decode(tensor), tensor.scalar_type()); });
  const auto settle = [&](const at::Tensor& tensor, const at::Tensor& value) {
    encode(*segment_of(tensor)->quantisation(), seen_as(value, c10::kFloat));
  };
  // If an operator on a list throws, it may already have run on the first tensors, or have deferred those calls.
  // Values that have not changed are encoded to the same codes.
  const auto may_have_changed = [](const at::Tensor&, const at::Tensor&) { return true; };
  values.run([&] { return run(call), true; }, settle, may_have_changed);
}

}  // namespace zeropage

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  library.def("decode(Tensor codes, Tensor? scales, bool is_signed) -> Tensor");
  library.def("encode_(Tensor(a!) codes, Tensor(b!)? scales, Tensor value, bool is_signed, int seed) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("decode", &zeropage::decode_ordinary);
  library.impl("encode_", &zeropage::encode_ordinary);
}
