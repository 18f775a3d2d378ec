#include "zeropage/rules/widened.h"

#include <torch/library.h>

#include "zeropage/rules/program.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

at::Tensor widen_ordinary(const at::Tensor& narrow) { return narrow.to(at::kFloat); }

}  // namespace

namespace {

std::optional<at::Tensor> widen_later(const at::Tensor& narrow, const at::Tensor& result) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("zeropage::widen", "");
  Substitution call;
  call.add(narrow, false, narrow, Access::read);
  return defer(op, call, Chunking::iterator, caffe2::TypeMeta::Make<float>(), result);
}

}  // namespace

at::Tensor widened(const at::Tensor& narrow) {
  if (auto wide = widen_later(narrow, {})) return *wide;
  at::Tensor wide = make_paged(segment_of(narrow)->domain(), narrow.sizes(), narrow.strides(),
                               caffe2::TypeMeta::Make<float>(), segment_of(narrow)->role());
  copy_windows(wide, narrow);
  return wide;
}

void widen_into(const at::Tensor& wide, const at::Tensor& narrow) {
  if (widen_later(narrow, wide)) return;
  segment_of(wide)->find_home();
  copy_windows(wide, narrow);
}

}  // namespace zeropage

TORCH_LIBRARY_FRAGMENT(zeropage, library) { library.def("widen(Tensor narrow) -> Tensor"); }

TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) { library.impl("widen", &zeropage::widen_ordinary); }
