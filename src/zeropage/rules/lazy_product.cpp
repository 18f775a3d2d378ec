#include "zeropage/rules/lazy_product.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/arange.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <unordered_set>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {
namespace {

constexpr const char* kRawAccess =
    "this tensor is the result of a linear layer that is larger than tile_above: zeropage makes it when an operator "
    "other than a view or a loss asks for it, and it has no address before. Call tensor.detach() once, whose result "
    "need not be used, or set tiling=\"off\"";

/// Whether a node makes a view, whose sizes and strides alone identify its rows.
bool is_view_node(const torch::autograd::Node& node) {
  static const std::unordered_set<std::string> names{
      "ViewBackward0",   "ReshapeAliasBackward0",  "UnsafeViewBackward0", "AliasBackward0",     "SliceBackward0",
      "SelectBackward0", "UnsqueezeBackward0",     "SqueezeBackward0",    "SqueezeBackward1",   "SqueezeBackward2",
      "SplitBackward0",  "TransposeBackward0",     "PermuteBackward0",    "AsStridedBackward0", "UnbindBackward0",
      "ExpandBackward0", "SplitWithSizesBackward0"};
  return names.count(node.name()) > 0;
}

}  // namespace

LazyProduct::Mark::Mark(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  version = version_of(tensor);
  if (const auto* segment = segment_of(tensor)) writes = segment->writes();
  storage = tensor.storage().unsafeGetStorageImpl();
  requires_grad = tensor.requires_grad();
}

bool LazyProduct::is_worth_it(const at::Tensor& x, const at::Tensor& weight, at::ScalarType dtype) {
  if (!c10::GradMode::is_enabled() || !Call::plain_modes()) return false;
  if (!(x.requires_grad() || weight.requires_grad()) || x.is_inference() || x.key_set().has(kPagedKey)) return false;
  const Domain& domain = *segment_of(weight)->domain();
  const std::size_t bytes = x.size(1) * weight.size(0) * c10::elementSize(dtype);
  if (!domain.partition.ranks) return bytes > domain.tile_above;
  // Pages that are read at once would only cost time: leave out layers inside of a model. In backward, an exact loss
  // takes the weight as often as its rows need.
  const bool is_vocabulary = weight.size(0) > 4 * weight.size(1);
  return is_vocabulary && domain.tiling != Tiling::exact && BlockedProduct::fits(weight, dtype);
}

LazyProduct::LazyProduct(Operands operands)
    : operands_(std::move(operands)),
      x_(operands_.x),
      weight_(operands_.weight),
      bias_(operands_.bias),
      dtype_(operands_.x.scalar_type()),
      rows_(operands_.x.size(1)),
      outputs_(operands_.weight.size(0)),
      is_stored_(operands_.stored != nullptr),
      stream_(c10::impl::VirtualGuardImpl(operands_.x.device().type()).getStream(operands_.x.device())) {}

void LazyProduct::record(const at::Tensor& product) {
  if (auto* lazy = of(product)) lazy->node_.emplace(product.grad_fn());
}

at::Tensor LazyProduct::make(Operands operands) {
  const std::int64_t rows = operands.x.size(1), columns = operands.weight.size(0);
  const auto dtype = c10::scalarTypeToTypeMeta(operands.dtype);
  const c10::Device device = operands.x.device();
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), rows * columns * dtype.itemsize(),
                                            c10::DataPtr(nullptr, device), nullptr, /*resizable=*/false);
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, new LazyProduct(std::move(operands)), &destroy, device));
  compat::install_guard(*storage, kRawAccess);
  const auto backend = c10::computeDispatchKey(std::nullopt, std::nullopt, device);
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(backend), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({1, rows, columns});
  compat::add_keys(*tensor.unsafeGetTensorImpl());
  return tensor;
}

LazyProduct* LazyProduct::of(const at::TensorBase& tensor) {
  auto* const lazy = at(tensor);
  return lazy && lazy->is_made_.load(std::memory_order_acquire) ? nullptr : lazy;
}

LazyProduct* LazyProduct::stored_of(const at::TensorBase& tensor) {
  auto* const lazy = at(tensor);
  return lazy && (lazy->is_stored_ || !lazy->is_made_.load(std::memory_order_acquire)) ? lazy : nullptr;
}

LazyProduct* LazyProduct::at(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kPagedKey) || !tensor.has_storage()) return nullptr;
  const auto& data =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &destroy) return nullptr;
  return static_cast<LazyProduct*>(data.get_context());
}

void LazyProduct::check_unchanged() const {
  const auto check = [&](const at::Tensor& tensor, const Mark& then, const char* name) {
    Mark now(tensor);
    now.requires_grad = then.requires_grad;  // changes no values
    if (now == then) return;
    throw Error(
        fmt::format("the result of linear, [{}, {}], is made when it is asked for, and its {} was changed since: ask "
                    "for it (for example with .detach()) before the optimizer's step, or set tiling=\"off\"",
                    rows_, outputs_, name));
  };
  check(operands_.x, x_, "input");
  check(operands_.weight, weight_, "weight");
  check(operands_.bias, bias_, "bias");
}

/// Whether autograd passes the gradient of `view` to the product's rows, with no hook on the way.
bool LazyProduct::is_view_of_this(const at::Tensor& view) const {
  if (has_tangent(view) || view.is_neg() || view.is_conj() || view.scalar_type() != operands_.dtype) return false;
  const NodePointer product = node_ ? node_->lock() : nullptr;
  if (!product) return false;
  for (auto node = view.grad_fn(); node;) {
    if (is_hooked(*node)) return false;
    if (node == product) return true;
    if (!is_view_node(*node) || node->next_edges().size() != 1) return false;
    node = node->next_edge(0).function;
  }
  return false;
}

std::optional<LazyProduct::Operands> LazyProduct::rows_of(const at::Tensor& view) {
  const std::lock_guard lock(mutex_);
  if ((is_made_ && !is_stored_) || !is_view_of_this(view)) return {};
  const std::int64_t dims = view.dim();
  if (dims == 0 || view.size(-1) != outputs_ || view.storage_offset() % outputs_ != 0) return {};
  if (view.numel() == 0 && !(is_stored_ && rows_ == 0)) return {};
  if (outputs_ > 1 && view.stride(-1) != 1) return {};
  check_unchanged();
  const auto grad = [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
  if (grad(operands_.x) != x_.requires_grad || grad(operands_.weight) != weight_.requires_grad ||
      grad(operands_.bias) != bias_.requires_grad) {
    return {};  // autograd recorded the product with the earlier requires_grad
  }
  const std::int64_t first = view.storage_offset() / outputs_, n = view.numel() / outputs_;
  Operands rows = operands_;
  if (view.is_contiguous() && n == rows_) {
    const Computing computing;
    if (is_made_ && !rows.stored->equals(result_.view({rows_, outputs_}))) return {};  // the program has written it
    return rows;
  }
  // The library may sum a product of some rows, and sums over them, in another order than those of all rows.
  if (rows.stored || segment_of(rows.weight)->domain()->tiling == Tiling::exact) return {};
  if (view.is_contiguous()) {
    rows.x = rows.x.narrow(1, first, n);
    return rows;
  }
  at::Tensor index = at::arange(first, first + 1, at::TensorOptions().dtype(at::kLong));
  for (std::int64_t i = 0; i < dims - 1; ++i) {
    if (view.stride(i) % outputs_ != 0) return {};
    index = index.unsqueeze(-1) + at::arange(view.size(i), index.options()) * (view.stride(i) / outputs_);
  }
  rows.x = rows.x.index_select(1, index.reshape(-1).to(rows.x.device()));
  return rows;
}

void LazyProduct::give_its_turn(torch::autograd::Node& node) const {
  if (const NodePointer product = node_ ? node_->lock() : nullptr) node.set_sequence_nr(product->sequence_nr());
}

bool LazyProduct::is_hooked(torch::autograd::Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() || !node.pre_hooks().empty() ||
         !node.post_hooks().empty();
}

void LazyProduct::look(const at::Tensor& tensor) {
  auto* lazy = of(tensor);
  if (!lazy) return;
  Operands done;  // dies after the lock is released, because its destruction may need other locks
  const std::lock_guard lock(lazy->mutex_);
  if (lazy->is_made_) return;
  const Operands& operands = lazy->operands_;
  if (!operands.stored) lazy->check_unchanged();
  const c10::impl::VirtualGuardImpl device(tensor.device().type());
  const c10::Stream now = device.getStream(tensor.device());
  const auto order = [&](const c10::Stream& after, const c10::Stream& before) {
    if (now == lazy->stream_) return;
    c10::Event event(tensor.device().type());
    event.record(before);
    event.block(after);
  };
  order(lazy->stream_, now);
  {
    const c10::StreamGuard guard(lazy->stream_);
    const Computing computing;
    const at::Tensor made = operands.stored
                                ? operands.stored->whole().unsqueeze(0)
                                : product(operands.x, operands.weight, operands.bias, /*rows_are_outputs=*/true);
    lazy->result_ = made.to(operands.dtype);
  }
  order(now, lazy->stream_);
  auto& storage = *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  compat::set_data(storage, lazy->result_.mutable_data_ptr());
  compat::set_guard(storage, /*closed=*/false);
  lazy->is_made_.store(true, std::memory_order_release);
  if (!lazy->is_stored_) std::swap(done, lazy->operands_);
}

namespace {

/// Whether the operator is a view, which needs no values. Except detach(): programs use it to request the values.
bool keeps_lazy(const Call& call) {
  static const std::unordered_set<std::string> looks{"aten::detach", "aten::detach_", "aten::set_",
                                                     "aten::alias_copy"};
  return (call.info.kind == OperatorKind::view && looks.count(call.name()) == 0) ||
         call.name() == "aten::_unsafe_view";
}

/// Returns the same rows in their own memory, in the same or another dtype.
bool convert(Call& call) {
  const at::Tensor self = call.argument(0).toTensor();
  auto* lazy = LazyProduct::stored_of(self);
  if (!lazy) return false;
  const bool is_clone = call.name() == "aten::clone";
  at::ScalarType dtype = self.scalar_type();
  if (!is_clone) {
    dtype = call.argument(1).toOptional<at::ScalarType>().value_or(dtype);
    const bool moves = !call.argument(2).isNone() || call.argument(4).toOptional<bool>().value_or(false) ||
                       call.argument(3).toOptional<c10::Device>().value_or(self.device()) != self.device();
    // The gradient goes back in one step, so no dtype on the way may be less precise.
    const bool is_wider = dtype == at::promote_types(dtype, lazy->dtype());
    if (moves || !c10::isFloatingType(dtype) || !is_wider) return false;
  }
  const auto format = call.argument(is_clone ? 1 : 6).toOptional<at::MemoryFormat>();
  const bool becomes_contiguous = format == at::MemoryFormat::Contiguous ||
                                  (format.value_or(at::MemoryFormat::Preserve) == at::MemoryFormat::Preserve &&
                                   at::IntArrayRef(at::infer_dense_strides(self.sizes(), self.strides())) ==
                                       c10::contiguous_strides(self.sizes()));
  if (!becomes_contiguous) return false;
  const auto rows = lazy->rows_of(self);
  if (!rows) return false;
  const at::Tensor made =
      differentiable_product(rows->x, rows->weight, rows->bias, /*rows_are_outputs=*/true, dtype, rows->stored);
  if (rows->stored) lazy->give_its_turn(*made.grad_fn());
  call.return_value(made.view(self.sizes()));
  return true;
}

}  // namespace

bool LazyProduct::run(Call& call) {
  c10::SmallVector<at::Tensor, 2> lazy;
  for (std::size_t i = 0; i < call.arguments; ++i) {
    const c10::IValue& value = call.argument(i);
    if (value.isTensor() && of(value.toTensor())) lazy.push_back(value.toTensor());
    if (!value.isList()) continue;
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && of(element.toTensor())) lazy.push_back(element.toTensor());
    }
  }
  const bool is_plain = Call::plain_modes() && c10::GradMode::is_enabled();
  const bool was_stored = call.arguments > 0 && call.argument(0).isTensor() && stored_of(call.argument(0).toTensor());
  if (is_plain && was_stored) {
    if (call.name() == "aten::cross_entropy_loss" && take_vocabulary_loss(call)) return true;
    if ((call.name() == "aten::clone" || call.name() == "aten::_to_copy") && convert(call)) return true;
  }
  if (lazy.empty()) return false;
  if (is_plain) {
    if (keeps_lazy(call)) {
      const Booking kernel(Spent::operators);
      call.op.redispatchBoxed(call.below, &call.stack);  // a copy inside reaches the fallback
      return true;
    }
  }
  if (call.info.kind == OperatorKind::metadata) return false;
  for (const at::Tensor& tensor : lazy) look(tensor);
  return false;
}

}  // namespace zeropage
