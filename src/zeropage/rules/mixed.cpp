#include "zeropage/rules/mixed.h"

#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "zeropage/rules/hi_lo.h"
#include "zeropage/rules/program.h"
#include "zeropage/rules/stand_ins.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

/// A view of another dtype has no master: it views the bits of the low-precision copy.
bool has_master(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  return segment && segment->master().defined() && is_whole(tensor) &&
         tensor.scalar_type() == segment->domain()->compute_dtype;
}

/// Whether the call writes a tensor with a master through a view that has none.
bool writes_part_of_mixed(const Call& call) {
  return std::any_of(call.paged.begin(), call.paged.end(), [](const PagedArgument& argument) {
    return argument.access != Access::read && argument.segment->master().defined() && !has_master(argument.tensor);
  });
}

/// Whether the master stores only the bits that the visible tensor lacks, not a full second tensor.
bool is_hi_lo(const at::Tensor& master) { return master.scalar_type() == c10::kShort; }

c10::ScalarType dtype_of_master(const StorageSegment& segment) {
  return is_hi_lo(segment.master()) ? c10::kFloat : segment.master().scalar_type();
}

/// The stored master, in this tensor's shape.
at::Tensor kept_for(const at::Tensor& tensor) {
  const at::Tensor& master = segment_of(tensor)->master();
  if (master.sizes() == tensor.sizes() && master.strides() == tensor.strides()) return master;
  return master.as_strided(tensor.sizes(), tensor.strides());
}

/// The master as a floating-point tensor. `asks`: the caller needs only its shape and dtype.
at::Tensor master_of(const at::Tensor& tensor, bool asks) {
  const at::Tensor kept = kept_for(tensor);
  if (!is_hi_lo(kept)) return kept;
  if (!asks) return join_hi_lo(tensor.detach(), kept);
  const auto* segment = segment_of(tensor);
  return make_paged(segment->domain(), tensor.sizes(), tensor.strides(), caffe2::TypeMeta::Make<float>(),
                    Role::optimizer, {.layout = segment_of(kept)->layout(), .like = segment, .unallocated = true});
}

const c10::OperatorHandle& copy_operator() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  return op;
}

/// Copies the master to the tensor; later, if operators on the master have yet to run.
void materialise(const at::Tensor& tensor, const at::Tensor& master) {
  if (segment_of(tensor)->master().defined() && is_hi_lo(segment_of(tensor)->master())) {
    return split_hi_lo(tensor, kept_for(tensor), master);
  }
  if (has_program(segment_of(master))) {
    Substitution copy;
    copy.add(tensor, false, tensor, Access::overwrite);
    copy.add(master, false, tensor, Access::read);
    copy.add(false, false, tensor, Access::read);  // non_blocking
    if (defer(copy_operator(), copy, Chunking::iterator, std::nullopt)) return;
  }
  copy_windows(tensor, master);
}

bool is_norm(const Call& call) {
  return call.name() == "aten::linalg_vector_norm" || call.name() == "aten::norm" ||
         call.name() == "aten::_foreach_norm";
}

/// Whether a call that writes none of its arguments must run on masters: if it needs only metadata, or if another
/// operand, and so the result, has the master's dtype.
bool reads_masters(Call& call) {
  const std::string& name = call.name();
  if (name == "aten::_to_copy" || call.info.kind == OperatorKind::metadata || is_norm(call)) return true;
  if (!call.info.pointwise && !call.info.list) return false;
  c10::ScalarType master = c10::ScalarType::Undefined;
  for (const PagedArgument& argument : call.paged) {
    if (has_master(argument.tensor)) master = dtype_of_master(*argument.segment);
  }
  const auto has_its_dtype = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.dim() > 0 && !has_master(tensor) && tensor.scalar_type() == master;
  };
  for (std::size_t i = 0; i < call.arguments; ++i) {
    const c10::IValue& value = call.argument(i);
    if (value.isTensor() && has_its_dtype(value.toTensor())) return true;
    if (!value.isTensorList()) continue;
    const auto list = value.toListRef();
    if (std::any_of(list.begin(), list.end(), [&](const c10::IValue& e) { return has_its_dtype(e.toTensor()); })) {
      return true;
    }
  }
  return false;
}

/// Whether it copies into an ordinary tensor of the visible dtype. The upper half of a split float32 rounds ties up,
/// not to even, so a rounded master could differ from it.
bool copies_what_is_seen(Call& call) {
  if (call.name() != "aten::copy_") return false;
  const at::Tensor to = call.argument(0).toTensor(), from = call.argument(1).toTensor();
  return !has_master(to) && has_master(from) && to.scalar_type() == from.scalar_type();
}

/// Whether a rule must run on masters: if it writes parameters, clones them, or reads masters anyway.
bool takes_masters(Call& call) {
  const auto mixed = [](const PagedArgument& argument) { return has_master(argument.tensor); };
  if (std::none_of(call.paged.begin(), call.paged.end(), mixed) || !Call::plain_modes()) return false;
  const bool asks = call.info.kind == OperatorKind::metadata;  // autograd has nothing to record
  if (call.needs_autograd() && !asks) return false;
  const bool writes = std::any_of(call.info.writes.begin(), call.info.writes.end(), [](bool write) { return write; });
  // lerp_ accepts only one dtype: that of its output.
  if (call.name() == "aten::lerp_" && !has_master(call.argument(0).toTensor())) return false;
  return (writes || call.name() == "aten::clone" || reads_masters(call)) && !copies_what_is_seen(call);
}

/// Casts other operands to the masters' dtype, for operators that accept only one dtype.
void widen_others(Call& call) {
  const c10::ScalarType dtype = call.argument(0).toTensor().scalar_type();
  for (std::size_t i = 0; i < call.arguments; ++i) {
    c10::IValue& value = call.argument(i);
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().scalar_type() == dtype) continue;
    if (c10::isReducedFloatingType(value.toTensor().scalar_type())) value = value.toTensor().to(dtype);
  }
  call.paged.clear();
  call.find_paged();
}

bool run_on_masters(Call& call) {
  StandIns masters(call);
  const bool asks = call.info.kind == OperatorKind::metadata;
  masters.replace([](const at::Tensor& tensor, bool) { return has_master(tensor); },
                  [&](const at::Tensor& tensor) { return master_of(tensor, asks); });
  const bool writes = std::any_of(call.paged.begin(), call.paged.end(),
                                  [](const PagedArgument& argument) { return argument.access != Access::read; });
  if (call.name() == "aten::lerp_") widen_others(call);
  const auto run = [&] {
    if (call.info.rule(call)) return true;
    // The operands have different layouts. On the low-precision copy the result would be rounded.
    if (!is_norm(call) && !(call.info.pointwise && writes)) return false;
    call.run_whole();
    return true;
  };
  // If an operator on a list throws, it may already have run on the first tensors, or have deferred those calls.
  const auto may_have_changed = [](const at::Tensor& tensor, const at::Tensor& master) {
    return has_program(segment_of(master)) || stored_master(tensor).defined();
  };
  const auto* const domain = call.paged[0].segment->domain().get();
  if (!masters.run(run, &materialise, may_have_changed)) return false;
  if (call.name() == "aten::clone") {
    at::Tensor copy = call.stack.back().toTensor();
    give_master(copy, *domain);
    call.stack.back() = copy;
  }
  return true;
}

}  // namespace

bool run_rule(Call& call) {
  if (writes_part_of_mixed(call)) return false;
  const bool done = takes_masters(call) ? run_on_masters(call) : call.info.rule(call);
  if (done) visible_follows(call);
  return done;
}

at::Tensor stored_master(const at::Tensor& tensor) {
  return has_master(tensor) && !is_hi_lo(segment_of(tensor)->master()) ? kept_for(tensor) : at::Tensor();
}

at::Tensor most_precise(const at::Tensor& tensor) {
  if (!has_master(tensor)) return tensor;
  c10::NoGradGuard no_grad;
  return master_of(tensor, /*asks=*/false);
}

void visible_follows(const Call& call) {
  for (const PagedArgument& argument : call.paged) {
    if (argument.access == Access::read) continue;
    const auto visible = argument.segment->visible();
    if (visible && segment_of(*visible)) follow_master(*segment_of(*visible));
  }
}

void follow_master(const StorageSegment& segment) {
  const auto storage = segment.storage().lock();
  if (!storage) return;
  c10::NoGradGuard no_grad;
  const at::Tensor& master = segment.master();
  const at::Tensor visible = segment.whole_tensor(master.sizes(), master.strides(),
                                                  c10::scalarTypeToTypeMeta(segment.domain()->compute_dtype));
  Substitution copy;
  copy.add(visible, false, visible, Access::overwrite);
  copy.add(master, false, visible, Access::read);
  copy.add(false, false, visible, Access::read);  // non_blocking
  if (!defer(copy_operator(), copy, Chunking::iterator, std::nullopt)) copy_windows(visible, master);
}

/// Whether gathers of the segment may have a coding.
static bool may_be_rounded(const StorageSegment& segment) {
  return segment.is_partitioned() && segment.domain()->partition.codes_gathers;
}

WrittenMasters::WrittenMasters(const Call& call) {
  for (const PagedArgument& argument : call.paged) {
    // An update that is left would run later, and end what add() asks of the gathers.
    if (argument.access != Access::read && may_be_rounded(*argument.segment)) argument.segment->complete();
  }
  for (const PagedArgument& argument : call.paged) {
    if (argument.access != Access::read) add(*argument.segment);
  }
}

void WrittenMasters::add_undeclared(const Call& call) {
  for (StorageSegment* const segment : call.undeclared) add(*segment, /*is_before=*/false);
}

void WrittenMasters::add(StorageSegment& segment, bool is_before) {
  const auto is_it = [&](const Written& written) { return written.segment == &segment; };
  if (!segment.master().defined() || std::any_of(written_.begin(), written_.end(), is_it)) return;
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  c10::NoGradGuard no_grad;
  if (is_before && may_be_rounded(segment)) {
    // Else the master would take what a coding has rounded for something that the operator wrote.
    segment.complete();
    segment.cache()->gather_exactly(segment);
  }
  const at::Tensor& master = segment.master();
  const auto dtype = c10::scalarTypeToTypeMeta(segment.domain()->compute_dtype);
  Written written{&segment, {}, {}, is_before};
  {
    c10::impl::IncludeDispatchKeyGuard paged(kPagedKey);
    written.visible = segment.whole_tensor(master.sizes(), master.strides(), dtype);
  }
  if (is_hi_lo(master) && is_before) {
    written.before = make_paged(segment.domain(), master.sizes(), master.strides(), dtype, segment.role(),
                                {.layout = segment.layout(), .like = &segment});
    copy_windows(written.before, written.visible);
  }
  written_.push_back(std::move(written));
}

void WrittenMasters::follow() const {
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  c10::NoGradGuard no_grad;
  for (const Written& written : written_) {
    const at::Tensor& master = written.segment->master();
    if (is_hi_lo(master) && !written.is_before) {  // what changed is unknown
      for_each_window({Operand{master, segment_of(master), Access::overwrite}}, Chunking::iterator,
                      [](c10::ArrayRef<at::Tensor> slices) { slices[0].zero_(); });
      continue;
    }
    c10::SmallVector<Operand, 8> operands{{master, segment_of(master), Access::write},
                                          {written.visible, written.segment, Access::read}};
    if (written.before.defined()) {
      operands.push_back({written.before, segment_of(written.before), Access::read});
      for_each_window(operands, Chunking::iterator, [](c10::ArrayRef<at::Tensor> slices) {
        // A changed value is exact. Bits tell +0 and -0 apart.
        slices[0].masked_fill_(slices[1].view(at::kShort).ne(slices[2].view(at::kShort)), 0);
      });
      continue;
    }
    for_each_window(operands, Chunking::iterator, [](c10::ArrayRef<at::Tensor> slices) {
      const at::Tensor changed = slices[0].to(slices[1].scalar_type()).ne(slices[1]);
      slices[0].copy_(at::where(changed, slices[1].to(slices[0].scalar_type()), slices[0]));
    });
  }
}

void give_master(at::Tensor& tensor, const Domain& domain) {
  c10::NoGradGuard no_grad;
  const auto* segment = segment_of(tensor);
  if (!segment || segment->master().defined() || !is_whole(tensor)) return;
  const auto like = [&](c10::ScalarType dtype, Role role) {
    return make_paged(segment->domain(), tensor.sizes(), tensor.strides(), c10::scalarTypeToTypeMeta(dtype), role,
                      {.like = segment, .placement = segment->is_own() ? Placement::own : Placement::same});
  };
  // Like in ZeRO, bits beyond the operators' precision belong to the optimizer.
  at::Tensor master = like(domain.keeps_hi_lo ? c10::kShort : domain.master_dtype, Role::optimizer);
  at::Tensor visible = tensor.detach();
  const bool changes = tensor.scalar_type() != domain.compute_dtype;
  if (!domain.keeps_hi_lo) materialise(master, visible);
  if (changes) {
    visible = like(domain.compute_dtype, segment->role());
    domain.keeps_hi_lo ? split_hi_lo(visible, master, tensor.detach()) : materialise(visible, master);
  }
  segment_of(visible)->set_master(master);
  if (domain.partition.codes_gathers && segment_of(visible)->is_partitioned()) {
    segment->domain()->gathered->set_coding(*segment_of(visible), domain.compute_dtype == at::kHalf
                                                                      ? Coding::float16_in_8_bits
                                                                      : Coding::bfloat16_in_8_bits);
  }
  segment_of(visible)->set_keeps_same(segment->keeps_same());
  if (!domain.keeps_hi_lo) segment_of(master)->set_visible(*segment_of(visible));
  if (changes) tensor.set_data(visible);
}

}  // namespace zeropage
