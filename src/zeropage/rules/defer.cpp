#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <unordered_set>

#include "zeropage/rules/deferred_program.h"

namespace zeropage {
namespace {

/// Whether the operator rounds each element once: then a vector loop and its scalar tail give the same bits.
bool rounds_once(const c10::OperatorHandle& op, const Substitution& call) {
  std::string_view name = op.schema().name();
  if (name.substr(0, 10) == "zeropage::") {
    return std::none_of(call.operands.begin(), call.operands.end(), [](const Operand& o) { return o.per > 1; });
  }
  name.remove_prefix(std::min(name.size(), std::string_view("aten::").size()));
  if (name.substr(0, 9) == "_foreach_") name.remove_prefix(9);
  if (!name.empty() && name.back() == '_') name.remove_suffix(1);
  static const std::unordered_set<std::string_view> exact{"mul",     "div",     "sqrt", "neg",  "abs",
                                                          "maximum", "minimum", "zero", "fill", "copy"};
  if (exact.count(name) > 0) return true;
  if (name != "add" && name != "sub") return false;
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    if (arguments[i].name() == "alpha") return call.arguments[i].isScalar() && call.arguments[i].toScalar().equal(1);
  }
  return true;
}

thread_local OneCall* current_call = nullptr;

/// A copy of a scalar's value at the call.
at::Tensor snapshot(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (segment_of(tensor)) {
    const PinRequest request{segment_of(tensor), Access::read};
    TensorPin pin(request);
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
    return tensor.clone();
  }
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  return tensor.clone();
}

/// Starts copying a scalar from its device.
HostCopy copy_to_host(const at::Tensor& kept) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const c10::DeviceType device = kept.device().type();
  HostCopy copy{at::empty(kept.sizes(), kept.options().device(c10::kCPU).pinned_memory(true)),
                std::make_shared<c10::Event>(device)};
  copy.tensor.copy_(kept, /*non_blocking=*/true);
  copy.done->record(c10::impl::VirtualGuardImpl(device).getStream(kept.device()));
  return copy;
}

/// Copies a scalar. A tensor made from a Python number must keep its own promotion rules.
at::Tensor copy_of_number(const at::Tensor& scalar) {
  if (!scalar.unsafeGetTensorImpl()->is_wrapped_number()) return snapshot(scalar);
  const OutsideModes unseen;
  at::Tensor copy = snapshot(scalar);
  copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

OneCall::Copy copy_of(const at::Tensor& scalar, const Domain& domain) {
  if (current_call) {
    const auto& copies = current_call->copies;
    const auto same = [&](const OneCall::Copy& copy) { return copy.original.is_same(scalar); };
    if (const auto found = std::find_if(copies.begin(), copies.end(), same); found != copies.end()) return *found;
  }
  OneCall::Copy copy{scalar, copy_of_number(scalar), {}};
  if (!scalar.is_cpu() && domain.offloads_updates() && !domain.planned_on) copy.in_host = copy_to_host(copy.kept);
  if (current_call && current_call->copies.size() < 8) current_call->copies.push_back(copy);
  return copy;
}

bool can_be_deferred(const Substitution& call) {
  if (call.operands.empty() || scope_domain()) return false;
  const auto* first = call.operands[0].segment;
  for (const Operand& operand : call.operands) {
    if (!operand.segment || operand.segment->domain() != first->domain()) return false;
    if (operand.segment->is_pinned()) return false;  // the holder of the pin may read its memory
    for (const Operand& other : call.operands) {
      if (other.segment == operand.segment && !Program::are_alike(other, operand)) return false;
    }
  }
  return true;
}

/// Whether ranks share all that the call writes, so that each writes its share alone.
bool writes_shares(const Substitution& call) {
  return std::ranges::all_of(call.operands, [](const Operand& operand) {
    return operand.access == Access::read || operand.segment->is_shareable() || operand.segment->is_of_share;
  });
}

/// The operands' common program, or a new one. Programs that cannot be joined run first.
ProgramPtr program_for(const Substitution& call, Chunking chunking, bool any_chunking) {
  c10::SmallVector<ProgramPtr, 4> found;
  std::size_t strangers = 1;
  for (const Operand& operand : call.operands) {
    if (auto program = std::static_pointer_cast<Program>(operand.segment->deferred())) {
      if (std::find(found.begin(), found.end(), program) == found.end()) found.push_back(std::move(program));
    } else {
      ++strangers;
    }
  }
  std::size_t slots = strangers;
  bool joinable = true;
  const bool over_ranks = call.operands[0].segment->domain()->partition.ranks != nullptr;
  for (const ProgramPtr& program : found) {
    // A program that writes a tensor of this rank alone runs on whole tensors, and an update of shares would too.
    joinable = joinable && (!over_ranks || program->writes_shares() == writes_shares(call));
    slots += program->slots().size();
    for (const Operand& operand : call.operands) joinable = joinable && !program->holds_otherwise(operand);
    joinable = joinable && !program->begun() && !program->is_sealed() && program->takes(chunking, any_chunking) &&
               program->fits(strangers);
    for (const ProgramPtr& other : found) joinable = joinable && program->takes_all_of(*other);
  }
  if (!found.empty() && joinable && found[0]->fits(slots - found[0]->slots().size())) {
    for (std::size_t i = 1; i < found.size(); ++i) found[0]->take_over(*found[i]);
    return found[0];
  }
  for (const ProgramPtr& program : found) program->run();
  const auto& domain = call.operands[0].segment->domain();
  auto program = std::make_shared<Program>(domain);
  auto& all = domain->deferred;
  if (all.size() >= 64 && all.size() >= 2 * domain->deferred_alive) {
    std::erase_if(all, [](const auto& weak) { return weak.expired(); });
    domain->deferred_alive = all.size();
  }
  all.push_back(program);
  return program;
}

}  // namespace

OneCall::OneCall() : outer_(std::exchange(current_call, this)) {}
OneCall::~OneCall() { current_call = outer_; }

std::optional<at::Tensor> defer(const c10::OperatorHandle& op, const Substitution& call, Chunking chunking,
                                std::optional<caffe2::TypeMeta> dtype, at::Tensor result) {
  if (!can_be_deferred(call)) return std::nullopt;
  const auto& domain = call.operands[0].segment->domain();
  for (const Operand& operand : call.operands) {
    // Wait here for content from other ranks: its tensor may be gone when the program runs.
    operand.segment->complete_pending();
  }
  std::lock_guard lock(domain->deferral_mutex);
  const bool any_chunking = rounds_once(op, call);
  const ProgramPtr program = program_for(call, chunking, any_chunking);
  c10::SmallVector<int, 8> slots;
  for (Operand operand : call.operands) {
    const auto reads_it = [&](const Operand& o) { return o.segment == operand.segment && o.access == Access::read; };
    const bool is_read = std::any_of(call.operands.begin(), call.operands.end(), reads_it);
    if (operand.access == Access::overwrite && is_read) operand.access = Access::write;
    slots.push_back(program->slot_of(operand));
  }
  int result_slot = -1;
  const Operand& like = call.operands[0];
  if (dtype && !result.defined()) {
    result = make_paged(domain, like.tensor.sizes(), strides_of_result(like.tensor), *dtype, like.segment->role(),
                        {.layout = like.segment->layout(), .like = like.segment, .unallocated = true});
  }
  if (dtype) result_slot = program->add_temporary(result);
  Substitution kept = call;
  kept.operands.clear();
  kept.scalars.clear();
  std::vector<HostCopy> in_host;
  for (std::size_t i = 0; i < kept.arguments.size(); ++i) {
    if (kept.operand_of[i] >= 0) kept.arguments[i] = c10::IValue();
    const c10::IValue& value = kept.arguments[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    OneCall::Copy copy = copy_of(value.toTensor(), *domain);
    kept.arguments[i] = std::move(copy.kept);
    if (!copy.in_host.tensor.defined()) continue;
    in_host.resize(kept.arguments.size());
    in_host[i] = std::move(copy.in_host);
  }
  program->add(Instruction(op, std::move(kept), std::move(slots), result_slot, std::move(in_host)), chunking,
               any_chunking);
  return result;
}

}  // namespace zeropage
