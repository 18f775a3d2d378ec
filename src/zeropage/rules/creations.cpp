// Operators that make tensors. A tensor made like a paged one is paged: optimizer states and copies of a model.
// Inside an init scope every factory makes paged tensors.
#include <ATen/ops/from_blob.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/strides.h>
#include <fmt/format.h>

#include <algorithm>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/rules/placement.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

/// The options of a factory call, found by the names that all factories of aten use.
struct Request {
  c10::ScalarType dtype;
  c10::Device device;
  bool plain;  // strided and not pinned, so that we can page it

  Request(Call& call, c10::ScalarType default_dtype, c10::Device default_device)
      : dtype(default_dtype), device(default_device), plain(true) {
    for (std::size_t i = 0; i < call.arguments; ++i) {
      const c10::IValue& value = call.argument(i);
      if (value.isNone()) continue;
      const std::string name = call.argument_name(i);
      if (name == "dtype") dtype = value.toScalarType();
      if (name == "device") device = value.toDevice();
      if (name == "layout") plain = plain && value.toLayout() == c10::kStrided;
      if (name == "pin_memory") plain = plain && !value.toBool();
    }
    if (device.type() == default_device.type() && !device.has_index()) device = default_device;
  }
};

std::optional<c10::MemoryFormat> memory_format_of(Call& call) {
  for (std::size_t i = 0; i < call.arguments; ++i) {
    if (call.argument_name(i) == "memory_format") return call.argument(i).toOptional<c10::MemoryFormat>();
  }
  return std::nullopt;
}

/// Whether the result has self's strides, so that windows can walk over both.
bool keeps_layout(Call& call, const at::Tensor& self) {
  const auto format = memory_format_of(call).value_or(c10::MemoryFormat::Preserve);
  if (format == c10::MemoryFormat::Preserve) return true;
  return format == c10::MemoryFormat::Contiguous && self.is_contiguous();
}

/// The role of a tensor made like one of `role` without being its copy: normally an optimizer state.
Role role_beside(Role role) { return role == Role::activation ? role : Role::optimizer; }

/// Fills a new tensor like the factory would. Calls the equivalent in-place operator through the dispatcher, so that
/// its rule and its generator apply.
void fill_created(Call& call, at::Tensor& created) {
  const SameValues same;  // otherwise `created` is this rank's own already
  const std::string& name = call.name();
  const auto named = [&](const char* argument) -> const c10::IValue* {
    for (std::size_t i = 0; i < call.arguments; ++i) {
      if (call.argument_name(i) == argument) return &call.argument(i);
    }
    return nullptr;
  };
  const auto* generator = named("generator");
  const auto draws = generator ? generator->toOptional<at::Generator>() : std::nullopt;
  if (name.find("ones") != std::string::npos) created.fill_(1);
  if (name.find("full") != std::string::npos) created.fill_(named("fill_value")->toScalar());
  if (name.find("randn") != std::string::npos)
    created.normal_(0, 1, draws);
  else if (name.find("rand") != std::string::npos)
    created.uniform_(0, 1, draws);
}

bool random_needs_floating(const std::string& name, c10::ScalarType dtype) {
  return name.find("rand") != std::string::npos && !c10::isFloatingType(dtype);
}

}  // namespace

namespace {

/// Over ranks, the placement does not depend on the content of `like`: zeros are the same on all ranks.
Creation creation_like(Call& call, const StorageSegment& like) {
  if (!like.domain()->partition.ranks || values_are_same()) return {};
  const std::string& name = call.name();
  const bool is_own = call.info.seeded || name.find("full") != std::string::npos;
  return {.like = &like, .placement = is_own ? Placement::own : Placement::same};
}

}  // namespace

bool make_like(Call& call) {
  if (call.paged.size() != 1 || !Call::plain_modes()) return false;
  const auto& [self, segment, _] = call.paged[0];
  const Request request(call, self.scalar_type(), self.device());
  const std::size_t bytes = self.numel() * c10::elementSize(request.dtype);
  if (!request.plain || request.device != segment->domain()->device || !segment->domain()->pages(bytes)) return false;
  if (!self.is_non_overlapping_and_dense() || !keeps_layout(call, self)) return false;
  if (random_needs_floating(call.name(), request.dtype)) return false;
  auto created = make_paged(segment->domain(), self.sizes(), self.strides(), c10::scalarTypeToTypeMeta(request.dtype),
                            role_beside(segment->role()), creation_like(call, *segment));
  fill_created(call, created);
  call.return_value(std::move(created));
  return true;
}

bool make_new(Call& call) {
  if (call.paged.size() != 1 || !Call::plain_modes()) return false;
  const auto& [self, segment, _] = call.paged[0];
  // A tensor of the same shape is an optimizer state; other shapes belong to the program's own arithmetic.
  if (!call.argument(1).isIntList() || call.argument(1).toIntVector() != self.sizes().vec()) return false;
  const Request request(call, self.scalar_type(), self.device());
  const std::size_t bytes = self.numel() * c10::elementSize(request.dtype);
  if (!request.plain || request.device != segment->domain()->device || !segment->domain()->pages(bytes)) return false;
  auto created = make_paged(segment->domain(), self.sizes(), c10::contiguous_strides(self.sizes()),
                            c10::scalarTypeToTypeMeta(request.dtype), role_beside(segment->role()),
                            creation_like(call, *segment));
  fill_created(call, created);
  call.return_value(std::move(created));
  return true;
}

namespace {

/// Returns a paged copy of a whole paged tensor in the same role, made page by page.
bool copy_into_new(Call& call, c10::ScalarType dtype) {
  const auto& [self, segment, _] = call.paged[0];
  const std::size_t bytes = self.numel() * c10::elementSize(dtype);
  if (self.dim() == 0 || !is_operand(self, self) || !keeps_layout(call, self) || !segment->domain()->pages(bytes)) {
    return false;
  }
  refresh_outside_steps(*segment);
  auto copy =
      make_paged(segment->domain(), self.sizes(), self.strides(), c10::scalarTypeToTypeMeta(dtype), segment->role(),
                 {.layout = segment->layout(),
                  .like = segment,
                  .placement = segment->is_own() ? Placement::own : Placement::same});
  copy_windows(copy, self);
  call.return_value(std::move(copy));
  return true;
}

}  // namespace

bool make_clone(Call& call) {
  if (call.needs_autograd() || !Call::plain_modes()) return false;
  return copy_into_new(call, call.paged[0].tensor.scalar_type());
}

bool make_converted(Call& call) {
  if (!Call::plain_modes()) return false;
  const at::Tensor& self = call.paged[0].tensor;
  const c10::Device home = call.paged[0].segment->domain()->device;
  const Request request(call, self.scalar_type(), self.device());
  if (request.device != home && !request.device.is_cpu() && !request.device.is_meta()) {
    throw AccessError(
        fmt::format("a tensor paged for device {} cannot move to {}: make its space with "
                    "zeropage.init(device=\"{}\") instead of moving the model",
                    home.str(), request.device.str(), request.device.str()));
  }
  if (call.needs_autograd() || request.device != home || !request.plain) return false;
  return copy_into_new(call, request.dtype);
}

bool make_from_meta(Call& call) {
  const auto domain = scope_domain();
  if (!domain || domain->planned_on || !Call::plain_modes() || call.name() != "aten::empty_like") return false;
  const at::Tensor self = call.argument(0).toTensor();
  if (!self.is_meta() || self.dim() == 0 || !self.is_non_overlapping_and_dense()) return false;
  const Request request(call, self.scalar_type(), self.device());
  const bool is_home = request.device.type() == domain->device.type() &&
                       (!request.device.has_index() || request.device == domain->device || domain->device.is_cpu());
  const std::size_t bytes = self.numel() * c10::elementSize(request.dtype);
  if (!is_home || !request.plain || !domain->pages(bytes) || !keeps_layout(call, self)) return false;
  call.return_value(
      make_paged(domain, self.sizes(), self.strides(), c10::scalarTypeToTypeMeta(request.dtype), Role::parameter));
  return true;
}

namespace {

/// Makes an ordinary copy that autograd records.
at::Tensor ordinary_copy(const at::Tensor& tensor) {
  const PinRequest request{segment_of(tensor), Access::read};
  const TensorPin pin(request);
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  return tensor.clone();
}

}  // namespace

/// Makes a sparse tensor from copies of its parts, because its operators read the parts' memory without reaching us.
/// Later writes to the values do not change the sparse tensor.
void make_sparse(Call& call) {
  for (std::size_t i = 0; i < call.arguments; ++i) {
    c10::IValue& value = call.argument(i);
    if (value.isTensor() && segment_of(value.toTensor())) value = ordinary_copy(value.toTensor());
  }
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const Booking kernel(Spent::operators);
  call.op.redispatchBoxed(call.below, &call.stack);
}

bool make_in_scope(Call& call) {
  const auto domain = scope_domain();
  // A compiler makes tensors without data, whose sizes are symbols.
  if (!domain || !Call::plain_modes() || !call.argument(0).isIntList()) return false;
  const bool full = call.name() == "aten::full";
  const auto scalar_type = [&] {  // torch.full takes its dtype from the value
    const auto value = call.argument(1).toScalar();
    return value.isFloatingPoint() ? c10::typeMetaToScalarType(c10::get_default_dtype()) : value.type();
  };
  const Request request(call, full ? scalar_type() : c10::typeMetaToScalarType(c10::get_default_dtype()),
                        domain->device);
  const auto sizes = call.argument(0).toIntVector();
  const std::size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(request.dtype);
  if (!request.plain || request.device != domain->device || !domain->pages(bytes) || sizes.empty()) return false;
  if (memory_format_of(call).value_or(c10::MemoryFormat::Contiguous) != c10::MemoryFormat::Contiguous) return false;
  if (random_needs_floating(call.name(), request.dtype)) return false;
  if (call.name() == "aten::empty_strided" &&
      at::IntArrayRef(call.argument(1).toIntVector()) != c10::contiguous_strides(sizes)) {
    return false;
  }
  if (call.name() == "aten::empty_permuted") {  // skip_init calls it, for a module on the meta device
    const auto order = call.argument(1).toIntVector();
    if (!std::is_sorted(order.begin(), order.end()) || order.size() != sizes.size()) return false;
  }
  auto created = make_paged(domain, sizes, c10::contiguous_strides(sizes), c10::scalarTypeToTypeMeta(request.dtype),
                            Role::parameter);
  fill_created(call, created);
  call.return_value(std::move(created));
  return true;
}

}  // namespace zeropage
