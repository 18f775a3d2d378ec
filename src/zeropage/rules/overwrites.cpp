// Writes of a whole tensor that do not need its content: they read no page.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "zeropage/rules/probe.h"
#include "zeropage/rules/program.h"
#include "zeropage/rules/rules.h"
#include "zeropage/rules/windows.h"

namespace zeropage {
namespace {

/// The written tensor, if it is paged, whole, and autograd need not see the write; else null.
const PagedArgument* whole_target(Call& call) {
  if (call.needs_autograd() || !Call::plain_modes()) return nullptr;
  const PagedArgument& first = call.paged[0];
  const bool is_self = first.tensor.is_same(call.argument(0).toTensor());
  return is_self && first.tensor.dim() > 0 && is_operand(first.tensor, first.tensor) ? &first : nullptr;
}

void finish(Call& call, at::Tensor self) {
  bump_version(self);
  call.return_value(std::move(self));
}

/// Defers the call if other operators on the target have yet to run.
bool join_program(Call& call, const PagedArgument& target) {
  if (!has_program(target.segment)) return false;
  Substitution substitution;
  for (std::size_t i = 0; i < call.arguments; ++i) {
    if (!substitution.add(call.argument(i), false, target.tensor, i == 0 ? Access::overwrite : Access::read))
      return false;
  }
  probe(call.op, substitution, /*is_cached=*/false);
  if (!defer(call.op, substitution, Chunking::iterator, std::nullopt)) return false;
  finish(call, target.tensor);
  return true;
}

bool fits(const StorageSegment& segment) { return segment.bytes() <= segment.cache()->frame_limit(); }

}  // namespace

bool run_zero(Call& call) {
  const PagedArgument* target = whole_target(call);
  if (!target) return false;
  if (join_program(call, *target)) return true;
  target->segment->zero();
  finish(call, target->tensor);
  return true;
}

bool run_fill(Call& call) {
  const PagedArgument* target = whole_target(call);
  if (!target || call.paged.size() > 1) return false;
  if (call.argument(1).isTensor() && call.argument(1).toTensor().dim() > 0) return false;
  if (join_program(call, *target)) return true;
  const c10::IValue value = call.argument(1);
  for_each_window({Operand{target->tensor, target->segment, Access::overwrite}}, Chunking::iterator,
                  [&](c10::ArrayRef<at::Tensor> slices) {
                    torch::jit::Stack stack{slices[0], value};
                    call_below(call.op, stack);
                  });
  finish(call, target->tensor);
  return true;
}

bool run_copy(Call& call) {
  if (call.needs_autograd() || !Call::plain_modes()) return false;
  const at::Tensor self = call.argument(0).toTensor(), source = call.argument(1).toTensor();
  if (self.dim() == 0 || self.is_same(source) || !is_operand(self, self) || !lies_like(source, self)) return false;
  if ((!segment_of(self) && !segment_of(source)) || source._is_zerotensor()) return false;
  copy_windows(self, source);
  finish(call, self);
  return true;
}

bool run_random(Call& call) {
  const PagedArgument* target = whole_target(call);
  if (!target || call.paged.size() > 1) return false;
  target->segment->complete();  // it may have no home yet
  if (fits(*target->segment)) {
    call.paged[0].access = Access::overwrite;
    call.run_whole();
    return true;
  }
  // A huge tensor is filled page by page on this thread, so that the generator draws in order. (A GPU's generator
  // counts by the size of the tensor, so its numbers differ from those for a whole tensor.)
  StorageSegment& segment = *target->segment;
  segment.refresh(Access::overwrite);
  const std::size_t per_page = segment.page_bytes() / target->tensor.itemsize();
  const auto options = target->tensor.options().requires_grad(false);
  const auto fill = [&](const at::Tensor& part) {
    torch::jit::Stack stack(call.stack.begin() + call.first, call.stack.end());
    stack[0] = part;
    call_below(call.op, stack);
  };
  // normal_() fills its last 16 elements again, which may begin on the page before the last one.
  constexpr std::size_t kAgain = 16;
  for (std::size_t i = 0, begin = 0; begin < segment.elements(); ++i, begin += per_page) {
    const std::size_t elements = std::min(per_page, segment.elements() - begin);
    const std::size_t rest = segment.elements() - begin - elements;
    PagePin page = segment.cache()->pin_page(segment, i, Access::overwrite);
    page.wait();
    const auto of_page = [&](PagePin& pin, std::size_t count) {
      return at::from_blob(
          pin.data(), {static_cast<std::int64_t>(count)}, [](void*) {}, options, target->tensor.device());
    };
    if (rest == 0 || rest >= kAgain) {
      fill(of_page(page, elements));
      continue;
    }
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
    const at::Tensor both = at::empty({static_cast<std::int64_t>(elements + rest)}, options);
    fill(both);
    of_page(page, elements).copy_(both.narrow(0, 0, static_cast<std::int64_t>(elements)));
    PagePin last = segment.cache()->pin_page(segment, i + 1, Access::overwrite);
    last.wait();
    of_page(last, rest).copy_(both.narrow(0, static_cast<std::int64_t>(elements), static_cast<std::int64_t>(rest)));
    break;
  }
  if (segment.is_partitioned()) segment.cache()->store(segment);
  finish(call, target->tensor);
  return true;
}

}  // namespace zeropage
