// The page fault: a boxed fallback on kPagedKey. It runs before autograd and autocast for every operator that touches
// a paged tensor, in forward, backward, recomputation, optimizers and anywhere else. Linking the library registers
// it.
#include "zeropage/fault/fallback.h"

#include <ATen/core/VariableHooksInterface.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <vector>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/current_activity.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/trace.h"
#include "zeropage/base/units.h"
#include "zeropage/rules/call.h"
#include "zeropage/rules/lazy_product.h"
#include "zeropage/rules/mixed.h"
#include "zeropage/rules/placement.h"
#include "zeropage/rules/quantised.h"
#include "zeropage/rules/rules.h"
#include "zeropage/train/gradients.h"

namespace zeropage {
namespace {

/// Describes the call for errors: "aten::mm on paged float32 [3072, 768] (9.4 MB), …".
std::string describe(const Call& call) {
  std::string text = call.name();
  for (const PagedArgument& argument : call.paged) {
    text += fmt::format("{}{} [{}] ({})", &argument == &call.paged[0] ? " on paged " : ", ",
                        c10::toString(argument.tensor.scalar_type()), fmt::join(argument.tensor.sizes(), ", "),
                        format_bytes(argument.segment->bytes()));
    if (&argument - &call.paged[0] == 3) {
      text += ", …";
      break;
    }
  }
  return text;
}

/// Throws while a graph is captured. A graph would keep addresses of frames, which other tensors use at its replay.
void refuse_capture(const Call& call) {
  const c10::Device device = call.paged[0].segment->domain()->device;
  if (device.is_cpu() || device.is_meta()) return;
  if (!compat::is_capturing(c10::impl::VirtualGuardImpl(device.type()).getStream(device))) return;
  throw AccessError(
      "operators on paged tensors cannot be captured in a graph: their memory is another at each replay. "
      "Capture only what holds ordinary tensors, or run without the graph");
}

bool is_to_one_rank(std::string_view name) {
  name.remove_prefix(name.find("::") + 2);
  return name == "send" || name.starts_with("recv_") || name == "isend" || name == "irecv" || name == "batch_p2p_ops";
}

/// Throws for a collective that may end only once another rank, which waits for this one, goes on.
void refuse_one_rank(const Call& call) {
  if (call.info.is_collective && is_to_one_rank(call.name())) {
    throw AccessError(
        "a paged tensor cannot be sent to one rank, or received from it, because its memory would have to stay until "
        "the other rank takes part: send an ordinary copy, torch.empty(t.shape, dtype=t.dtype).copy_(t), and copy "
        "what "
        "was received");
  }
}

/// Hooks the leaves among paged arguments; the result must live through the operator.
c10::SmallVector<LeafHold, 4> hook_leaves(const Call& call) {
  c10::SmallVector<LeafHold, 4> holds;
  for (const PagedArgument& argument : call.paged) {
    if (argument.tensor.requires_grad() && argument.tensor.is_leaf()) holds.push_back(hook_gradient(argument.tensor));
  }
  return holds;
}

/// Pages results inside an init scope that were made from no tensor, or from paged ones without autograd. An argument
/// that the operator wrote and returns stays as it is.
void adopt_results(Call& call, bool is_made_here) {
  const auto domain = scope_domain();
  if (!domain || !Call::plain_modes()) return;
  if (!is_made_here && call.info.takes_tensors && call.name() != "aten::lift_fresh") return;
  const auto& returns = call.op.schema().returns();
  for (std::size_t i = call.first; i < call.stack.size(); ++i) {
    const auto* alias = returns[i - call.first].alias_info();
    if (!call.stack[i].isTensor() || (alias && alias->isWrite())) continue;
    const at::Tensor result = call.stack[i].toTensor();
    if (has_memory_of_torch(result)) adopt(domain, result, Role::parameter);
  }
}

/// Whether it copies foreign memory, for example in torch.tensor(array): the copy counts as made by a factory.
bool copies_foreign_memory(Call& call) {
  if (!scope_domain() || call.arguments == 0 || !call.argument(0).isTensor()) return false;
  const std::string& name = call.name();
  if (name != "aten::to" && name != "aten::_to_copy" && name != "aten::clone") return false;
  const at::Tensor source = call.argument(0).toTensor();
  return source.defined() && source.has_storage() && !has_memory_of_torch(source);
}

/// Gives a factory without a device argument the space's device, inside an init scope.
void choose_device(Call& call) {
  const auto domain = scope_domain();
  if (!domain || domain->device.is_cpu() || call.info.takes_tensors) return;
  for (std::size_t i = 0; i < call.arguments; ++i) {
    if (call.argument(i).isNone() && call.argument_name(i) == "device") call.argument(i) = domain->device;
  }
}

/// Replaces "cpu:0", which launchers use, by "cpu", the device of our tensors.
void drop_cpu_index(Call& call) {
  for (std::size_t i = 0; i < call.arguments; ++i) {
    const c10::IValue& value = call.argument(i);
    if (value.isDevice() && value.toDevice().is_cpu()) call.argument(i) = c10::Device(c10::kCPU);
  }
}

/// Pins the tensor of positions that tensor_split may have: it reads that tensor and does not view it.
TensorPin pin_cuts(Call& call) {
  auto* segment = call.info.cuts_by_content ? segment_of(call.argument(1).toTensor()) : nullptr;
  return segment ? TensorPin(PinRequest{segment, Access::read}) : TensorPin();
}

/// Runs set_(): the tensor may drop its segment, and an ordinary tensor may get another's. In C++, where nobody
/// watches the program's parameters, a tensor that was paged stays paged.
void set_storage(Call& call) {
  at::Tensor tensor = call.argument(0).toTensor();
  const at::Tensor source =
      call.arguments > 1 && call.argument(1).isTensor() ? call.argument(1).toTensor() : at::Tensor();
  const auto* before = segment_of(tensor);
  const auto domain = before && !has_error_translator() ? before->domain() : nullptr;
  const Role role = before ? before->role() : Role::parameter;
  const std::uint64_t number = before ? before->number() : 0;
  if (domain && before->master().defined() && source.defined() && source.scalar_type() != tensor.scalar_type()) {
    // An archive of the module as it was built, which set_() would take for the bits of compute_dtype.
    at::impl::GetVariableHooks()->set_data(tensor, source);
    call.return_value(tensor);
  } else {
    call.run_whole();
  }
  auto& impl = *tensor.unsafeGetTensorImpl();
  if (impl.has_storage() && segment_of(*impl.unsafe_storage().unsafeGetStorageImpl())) {
    compat::add_keys(impl);
  } else if (domain) {
    page_data(domain, tensor, source, role, number);
  }
}

/// Runs a call without paged arguments. Inside an init scope its results may be paged.
void run_ordinary(Call& call) {
  choose_device(call);
  if (scope_domain() && call.info.rule && !call.info.takes_tensors && call.info.rule(call)) return;
  if (scope_domain() && make_from_meta(call)) return;
  const bool copies = copies_foreign_memory(call);
  {
    // Exclude the key: a view of an ordinary tensor may still copy inside, and only a composite's final results are
    // paged.
    c10::impl::ExcludeDispatchKeyGuard guard(kPagedKeys);
    const Booking kernel(Spent::operators);
    call.op.redispatchBoxed(call.below, &call.stack);
  }
  adopt_results(call, copies);
}

/// Runs a view, which needs no data.
void run_view(Call& call) {
  const Booking kernel(Spent::operators);
  if (call.info.made_of_views) {
    c10::impl::ExcludeDispatchKeyGuard guard(kPagedKeys);
    return call.op.redispatchBoxed(call.below, &call.stack);
  }
  if (call.info.moves) drop_cpu_index(call);
  const TensorPin cuts = pin_cuts(call);
  // Keep the key: reshape and similar operators are marked as views and may copy inside.
  call.op.redispatchBoxed(call.below, &call.stack);
}

/// Runs the call by its rule, if possible. Rules run below autocast, so they do not take operators that it casts.
bool run_by_rule(Call& call) {
  if (!call.info.rule || autocasts(call.op, call.paged[0].tensor.device().type())) return false;
  if (run_rule(call)) return true;
  if (call.info.kind == OperatorKind::data && !call.needs_autograd()) {
    call.paged[0].segment->domain()->unpaged_operators.count(call.name());
  }
  return false;
}

/// Runs the call with whole tensors in memory, or with copies of small parts of huge ones.
void run_general(Call& call) {
  if (call.info.sets) return set_storage(call);
  if (call.info.kind == OperatorKind::metadata) {
    c10::impl::ExcludeDispatchKeyGuard guard(kPagedKeys);
    return call.redispatch();
  }
  const bool adopts = scope_domain() && !call.needs_autograd();
  const auto mixes = [](const PagedArgument& argument) { return argument.segment->domain()->mixes(); };
  if (std::any_of(call.paged.begin(), call.paged.end(), mixes)) {
    WrittenMasters written(call);
    if (!call.may_tile || !run_on_copies(call)) call.run_whole();
    written.add_undeclared(call);
    written.follow();
    visible_follows(call);
  } else if (!call.may_tile || !run_on_copies(call)) {
    call.run_whole();
  }
  if (adopts) adopt_results(call, true);
}

/// Runs the call by its tiles, if it has any.
bool run_in_tiles(Call& call) {
  const Booking kernels(Spent::operators);
  return call.info.tile(call);
}

void run_paged(Call& call) {
  const auto leaves = hook_leaves(call);
  if (call.info.kind == OperatorKind::view) return run_view(call);
  if (call.info.makes_sparse) return make_sparse(call);
  if (call.may_tile && call.info.tile && run_in_tiles(call)) return;
  if (run_by_rule(call)) return;
  run_general(call);
}

/// The book of the call's time, or null.
BookedTime* book_of(const Call& call) {
  if (!call.paged.empty()) return &call.paged[0].segment->domain()->cache->booked();
  const auto domain = scope_domain();
  return domain ? &domain->cache->booked() : nullptr;
}

void run(Call& call) {
  const Booking booking(book_of(call), Spent::overhead);
  if (call.has_lazy && LazyProduct::run(call)) return;
  if (call.paged.empty()) return run_ordinary(call);
  // Check before anything is deferred or prefetched: a forked child has neither the memory nor the ring.
  if (call.info.kind == OperatorKind::data) {
    call.paged[0].segment->domain()->cache->check_usable();
    refuse_one_rank(call);
    // A call that a rule defers may join a program that has not begun, such as an average of weights.
    advance_opened(*call.paged[0].segment->domain(), /*may_begin=*/!call.info.rule);
    settle_placements(call);
  }
  takes_quantised(call) ? run_dequantised(call, run_paged) : run_paged(call);
}

/// Tells the scope the tensors that may become parameters. Results are on the stack in place of the arguments.
void note_results(const Call& call) {
  for (std::size_t i = call.first; i < call.stack.size(); ++i) {
    if (call.stack[i].isTensor()) note_result(call.stack[i].toTensor());
  }
}

std::atomic<std::shared_ptr<void> (*)()> around_faults = nullptr;

template <c10::DispatchKey kKey>
void fault(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const OperatorInfo& info = info_of(op);
  const auto begin_around = around_faults.load(std::memory_order_relaxed);
  const auto around = begin_around ? begin_around() : nullptr;
  const std::size_t arguments = op.schema().arguments().size();
  const auto below = (keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey)).remove(kInnerKey);
  Call call{op, info, below, *stack, stack->size() - arguments, arguments};
  call.find_paged();
  const CurrentActivity activity([](const void* call) { return describe(*static_cast<const Call*>(call)); }, &call);
  const bool is_traced = Trace::is_on() && call.info.kind == OperatorKind::data && !call.paged.empty();
  const auto begin = is_traced ? Trace::Clock::now() : Trace::Time();
  try {
    if (call.info.kind == OperatorKind::data && !call.paged.empty()) refuse_capture(call);
    if (call.info.fused && !call.paged.empty()) quantise_moments(call);
    run(call);
  } catch (const Error& error) {
    throw_translated(error, describe(call));
  }
  if (scope_begins_parameters()) note_results(call);
  if (is_traced) Trace::span("operator", call.name(), begin, Trace::Clock::now());
}

}  // namespace

void set_around_faults(std::shared_ptr<void> (*begin)()) { around_faults = begin; }

void page_inner_tensors() {
  // PyTorch prefers kernels for all backends, such as zeros_like's, to a key's fallback. Each of them gets one of
  // ours for this key.
  static const auto* const registered = [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto kernel = c10::KernelFunction::makeFromBoxedFunction<&fault<kInnerKey>>();
    auto* const all = new std::vector<c10::RegistrationHandleRAII>;
    all->push_back(dispatcher.registerFallback(kInnerKey, kernel, "zeropage"));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findOp(name);
      const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
      if (!op || !op->hasSchema() || has(kInnerKey)) continue;
      if (has(c10::DispatchKey::CompositeExplicitAutograd) ||
          has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) {
        all->push_back(dispatcher.registerImpl(name, kInnerKey, kernel, std::nullopt, nullptr, "zeropage"));
      }
    }
    compat::pages_inner_tensors = true;
    return all;
  }();
  (void)registered;
}

}  // namespace zeropage

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&zeropage::fault<zeropage::kPagedKey>>());
}
