#include "zeropage/rules/placement.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>

#include "zeropage/base/no_paging_guard.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

/// The placements of a call's inputs, without the tensor that it writes.
struct Taken {
  bool own_tensor = false, own_number = false;
  bool is_own() const { return own_tensor || own_number; }
};

/// Adds an input. One element counts as a number only if the written tensor has more.
void take(Taken& taken, const at::Tensor& tensor, const at::Tensor& written, bool values_same) {
  if (!tensor.defined()) return;
  const auto* segment = segment_of(tensor);
  const bool own = segment ? segment->placement() == Placement::own : !values_same;
  const bool is_number = tensor.numel() <= 1 && (!written.defined() || written.numel() > 1);
  if (own) (is_number ? taken.own_number : taken.own_tensor) = true;
}

/// Whether an argument is a number. Defaults count too, because another rank may have passed another value.
bool is_number(Call& call, std::size_t i) { return call.info.numbers[i] && !call.argument(i).isNone(); }

/// `written`: the tensor that the call writes; undefined for its results.
Taken taken_by(Call& call, std::size_t element, const at::Tensor& written) {
  Taken taken;
  const bool values_same = values_are_same();
  if ((call.info.seeded || call.info.is_collective) && !values_same) taken.own_tensor = true;
  for (std::size_t i = 0; i < call.arguments; ++i) {
    const c10::IValue& value = call.argument(i);
    if (value.isTensor()) {
      if (!value.toTensor().is_same(written)) take(taken, value.toTensor(), written, values_same);
    } else if (value.isTensorList()) {
      const auto list = value.toListRef();
      for (std::size_t k = 0; k < list.size(); ++k) {
        if (call.info.list && k != element) continue;
        if (!list[k].toTensor().is_same(written)) take(taken, list[k].toTensor(), written, values_same);
      }
    } else if (!values_same && is_number(call, i)) {
      taken.own_number = true;
    }
  }
  return taken;
}

/// Logs a write under the contract, for ranks to compare. It skips autograd's own sums, which may differ between
/// ranks and are not the program's writes.
void note_contract(Call& call, std::size_t element, const at::Tensor& written, StorageSegment& segment) {
  ContractLog& log = segment.domain()->contract;
  if (torch::autograd::get_current_graph_task_id() >= 0 || !log.samples()) return;
  const auto note = [&](double value) {
    log.note(segment.number(), value,
             fmt::format("{} on a {} [{}]", call.name(), name_of(segment.role()), fmt::join(written.sizes(), ", ")));
  };
  const auto note_tensor = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || segment_of(tensor) || !tensor.is_cpu() || tensor.layout() != c10::kStrided) return;
    if (tensor.numel() > 0 && !tensor._is_zerotensor() && !tensor.is_quantized()) note(sample_of(tensor));
  };
  for (std::size_t i = 0; i < call.arguments; ++i) {
    const c10::IValue& value = call.argument(i);
    if (value.isTensor()) {
      note_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      const auto list = value.toListRef();
      if (element < list.size()) note_tensor(list[element].toTensor());
    } else if (is_number(call, i) && value.isScalar() && !value.toScalar().isComplex()) {
      note(value.toScalar().toDouble());
    }
  }
}

/// Whether the call writes all of the tensor and cannot throw. Otherwise the content must stay until it has written.
bool overwrites_all(Call& call, const at::Tensor& written) {
  if (call.name() != "aten::copy_" || !is_whole(written)) return false;
  const at::Tensor from = call.argument(1).toTensor();
  if (from.sizes() != written.sizes() || from.layout() != c10::kStrided || !from.has_storage()) return false;
  const auto storage_of = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  };
  return storage_of(from) != storage_of(written) && from.is_complex() == written.is_complex();
}

/// Whether autograd adds a mean over ranks to an earlier gradient, perhaps one that the program has copied: the sum
/// is the same on all ranks if that was.
bool accumulates_mean(Call& call) {
  if (call.name() != "aten::add_" || torch::autograd::get_current_graph_task_id() < 0) return false;
  const auto* const part = segment_of(call.argument(1).toTensor());
  return part && part->placement() == Placement::sum && call.argument(2).toScalar().equal(1);
}

/// Whether a call that failed on one rank, and is repeated, leaves nothing of what was before.
bool writes_all_anew(std::string_view name) {
  return name == "aten::_foreach_copy_" || name == "aten::zero_" || name == "aten::_foreach_zero_" ||
         name == "aten::fill_";
}

/// True if the tensor's segment may be another one now.
bool settle(Call& call, std::size_t element, const at::Tensor& written) {
  auto* segment = segment_of(written);
  if (!segment || !segment->domain()->partition.ranks || segment->is_own()) return false;
  // In a scope ranks draw the same numbers, and tensors that are not partitioned become rank 0's. But each rank keeps
  // its share of content that the program copies in, so ranks must copy the same.
  const bool in_scope = scope_domain() != nullptr;
  if (in_scope && segment->is_partitioned() && call.name() == "aten::copy_") {
    note_contract(call, element, written, *segment);
  }
  const Taken taken = taken_by(call, element, written);
  const bool keeps_same = segment->keeps_same() || segment->quantisation();  // a moment
  if (keeps_same || (segment->is_reduced() && !taken.own_tensor)) {
    if (!in_scope) note_contract(call, element, written, *segment);
    // A copy, such as one of a load that failed and was repeated, leaves nothing of what was before. Backward may add
    // to a gradient more often on some ranks.
    const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
    const bool is_state = segment->leaf_known || (segment->is_reduced() && !in_backward);
    const bool is_counted = !in_scope && is_state && call.name() != "aten::copy_";
    if (is_counted) {
      segment->domain()->contract.count(call.name());
      if (!writes_all_anew(call.name())) segment->note_program_write();
    }
    return false;
  }
  if (!taken.is_own() || (!taken.own_tensor && accumulates_mean(call))) return false;
  make_own(written, overwrites_all(call, written));
  return true;
}

/// All of a tensor's storage as a flat tensor of a plain dtype.
at::Tensor flat_storage(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  const auto elements = static_cast<std::int64_t>(segment->elements());
  const std::size_t item =
      tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() / std::max<std::int64_t>(elements, 1);
  const auto dtype = item == 1   ? at::kByte
                     : item == 2 ? at::kShort
                     : item == 4 ? at::kInt
                     : item == 8 ? at::kLong
                                 : at::kComplexDouble;
  return segment->whole_tensor({elements}, {1}, c10::scalarTypeToTypeMeta(dtype));
}

/// Moves the tensor's content to a new home, made with `creation`.
void move_home(const at::Tensor& tensor, const Creation& creation, bool with_content) {
  c10::NoGradGuard no_grad;
  StorageSegment& segment = *segment_of(tensor);
  const at::Tensor content = flat_storage(tensor);
  const at::Tensor made =
      make_paged(segment.domain(), content.sizes(), content.strides(), content.dtype(), segment.role(), creation);
  if (with_content) copy_windows(made, content);
  const bool keeps_same = segment.keeps_same();
  const at::Tensor master = segment.master();
  const auto visible = segment.visible();
  const auto outer = segment.outer();
  take_segment(tensor, made);
  StorageSegment& moved = *segment_of(tensor);
  moved.set_master(master);
  moved.set_keeps_same(keeps_same);
  moved.set_outer(outer);
  if (visible) moved.set_visible(*segment_of(*visible));
}

}  // namespace

double sample_of(at::Tensor tensor) {
  const NoPagingGuard no_paging;
  while (tensor.dim() > 0) tensor = tensor.select(0, tensor.size(0) / 2);
  return tensor.is_complex() ? std::abs(tensor.item().toComplexDouble()) : tensor.item().toDouble();
}

Placement placement_of(Call& call, std::size_t element) {
  return taken_by(call, element, {}).is_own() ? Placement::own : Placement::same;
}

void settle_placements(Call& call) {
  const auto is_over_ranks = [](const PagedArgument& argument) {
    return argument.access != Access::read && argument.segment->domain()->partition.ranks;
  };
  if (std::none_of(call.paged.begin(), call.paged.end(), is_over_ranks)) return;
  // Find paged arguments again at once: errors and messages to other ranks read their segments.
  const auto settle_one = [&](std::size_t element, const at::Tensor& written) {
    if (!settle(call, element, written)) return;
    call.paged.clear();
    call.find_paged();
  };
  for (std::size_t i = 0; i < call.arguments; ++i) {
    if (!call.info.writes[i]) continue;
    const c10::IValue value = call.argument(i);
    if (value.isTensor()) settle_one(0, value.toTensor());
    if (value.isTensorList()) {
      const auto list = value.toTensorVector();
      for (std::size_t k = 0; k < list.size(); ++k) settle_one(k, list[k]);
    } else if (call.info.is_collective && value.isList()) {  // lists of lists
      for (const c10::IValue& list : value.toList().vec()) {
        if (!list.isTensorList()) continue;
        for (const at::Tensor& written : list.toTensorVector()) settle_one(0, written);
      }
    }
  }
}

void make_own(const at::Tensor& tensor, bool overwritten) {
  StorageSegment& segment = *segment_of(tensor);
  if (segment.master().defined()) make_own(segment.master(), overwritten);
  if (segment.is_own()) return;
  if (segment.is_unallocated()) {  // its home will be whole
    segment.become_own();
    segment.complete();
    return segment.find_home();
  }
  segment.complete();
  if (!segment.is_partitioned()) {
    segment.refresh(overwritten ? Access::overwrite : Access::write);
    return segment.become_own();
  }
  move_home(tensor, {.number = segment.number(), .placement = Placement::own}, !overwritten && segment.is_touched());
}

void make_same(const at::Tensor& tensor) {
  StorageSegment& segment = *segment_of(tensor);
  if (segment.master().defined()) make_same(segment.master());
  if (!segment.is_own()) return;
  segment.complete();
  move_home(tensor, {.number = segment.number()}, /*with_content=*/true);
}

void make_whole(const at::Tensor& tensor) {
  StorageSegment& segment = *segment_of(tensor);
  if (segment.master().defined()) make_whole(segment.master());
  if (segment.is_own() || segment.layout() == Layout::replicated) return;
  segment.complete();
  move_home(tensor, {.layout = Layout::replicated, .number = segment.number()}, segment.is_touched());
}

void refresh_outside_steps(StorageSegment& segment) {
  if (segment.is_stale() && segment.role() == Role::parameter && !values_are_same()) segment.refresh(Access::read);
}

void note_states(c10::ArrayRef<at::Tensor> states) {
  for (const at::Tensor& state : states) {
    auto* segment = segment_of(state);
    if (!segment || !segment->domain()->partition.ranks || segment->keeps_same()) continue;
    make_same(state);
    segment_of(state)->set_keeps_same(true);
  }
}

}  // namespace zeropage
