#include "zeropage/rules/call.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/clock.h"
#include "zeropage/rules/lazy_product.h"

namespace zeropage {

void Call::find_paged() {
  const auto see = [&](const at::Tensor& tensor, bool write) {
    if (auto* segment = segment_of(tensor)) {
      paged.push_back({tensor, segment, write ? Access::write : Access::read});
      may_tile |= !segment->is_always_in_memory() || segment->bytes() > segment->domain()->tile_above;
      if (write) segment->note_write();
    } else if (LazyProduct::stored_of(tensor)) {
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
        if (!info.is_collective || !element.isTensorList()) continue;
        for (const at::Tensor& tensor : element.toTensorVector()) see(tensor, info.writes[i]);
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

void call_below(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_us(kPagedKeys | c10::autocast_dispatch_keyset);
  const Booking kernel(Spent::operators);
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
