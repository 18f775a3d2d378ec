#include "zeropage/rules/hi_lo.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "zeropage/kernels/update.h"
#include "zeropage/rules/program.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

// --- on ordinary tensors, for a program's instructions on its pieces ---

kernels::Array hi_lo_array(const at::Tensor& high, const at::Tensor& low) {
  return {kernels::Format::hi_lo_float32, high.mutable_data_ptr(), low.mutable_data_ptr()};
}

at::Tensor join_hi_lo_ordinary(const at::Tensor& high, const at::Tensor& low) {
  if (!high.is_cpu()) {
    const at::Tensor bits = high.view(at::kShort).to(at::kInt).bitwise_left_shift_(at::Scalar(16));
    return bits.add_(low).view(at::kFloat);
  }
  at::Tensor value = at::empty(high.sizes(), high.options().dtype(at::kFloat));
  kernels::decode(hi_lo_array(high, low), 0, high.numel(), value.mutable_data_ptr<float>());
  return value;
}

void split_hi_lo_ordinary(const at::Tensor& high, const at::Tensor& low, const at::Tensor& value) {
  const at::Tensor floats = value.to(at::kFloat).contiguous();
  if (high.is_cpu()) {
    return kernels::encode(hi_lo_array(high, low), 0, high.numel(), floats.const_data_ptr<float>());
  }
  const at::Tensor bits = floats.view(at::kInt), lacks_nothing = floats.isnan();
  const at::Tensor top = bits.add(0x8000).bitwise_right_shift_(at::Scalar(16));
  low.copy_(bits.sub(top.bitwise_left_shift(at::Scalar(16))).masked_fill_(lacks_nothing, 0));
  high.view(at::kShort).copy_(top.masked_fill_(lacks_nothing, 0x7fc0));
}

at::Tensor& split_hi_lo_in_place(at::Tensor& high, at::Tensor& low, const at::Tensor& value) {
  split_hi_lo_ordinary(high, low, value);
  return high;
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

}  // namespace

at::Tensor join_hi_lo(const at::Tensor& high, const at::Tensor& low) {
  static const auto op = operator_named("zeropage::join_hi_lo");
  Substitution call;
  call.add(high, false, high, Access::read);
  call.add(low, false, high, Access::read);
  if (auto value = defer(op, call, Chunking::iterator, caffe2::TypeMeta::Make<float>())) return *value;
  at::Tensor value = make_paged(segment_of(high)->domain(), high.sizes(), high.strides(),
                                caffe2::TypeMeta::Make<float>(), Role::optimizer, {.like = segment_of(high)});
  const Operand operands[] = {{value, segment_of(value), Access::overwrite},
                              {high, segment_of(high), Access::read},
                              {low, segment_of(low), Access::read}};
  for_each_window(operands, Chunking::iterator, [](c10::ArrayRef<at::Tensor> slices) {
    slices[0].copy_(join_hi_lo_ordinary(slices[1], slices[2]));
  });
  return value;
}

void split_hi_lo(const at::Tensor& high, const at::Tensor& low, const at::Tensor& value) {
  static const auto op = operator_named("zeropage::split_hi_lo_");
  if (has_program(segment_of(value))) {
    Substitution call;
    call.add(high, false, high, Access::overwrite);
    call.add(low, false, high, Access::overwrite);
    call.add(value, false, high, Access::read);
    if (defer(op, call, Chunking::iterator, std::nullopt)) return;
  }
  const Operand operands[] = {{high, segment_of(high), Access::overwrite},
                              {low, segment_of(low), Access::overwrite},
                              {value, segment_of(value), Access::read}};
  for_each_window(operands, Chunking::iterator,
                  [](c10::ArrayRef<at::Tensor> slices) { split_hi_lo_ordinary(slices[0], slices[1], slices[2]); });
}

}  // namespace zeropage

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  library.def("join_hi_lo(Tensor high, Tensor low) -> Tensor");
  library.def("split_hi_lo_(Tensor(a!) high, Tensor(b!) low, Tensor value) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("join_hi_lo", &zeropage::join_hi_lo_ordinary);
  library.impl("split_hi_lo_", &zeropage::split_hi_lo_in_place);
}
