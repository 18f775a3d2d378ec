#include "zeropage/rules/stand_ins.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace zeropage {
namespace {

bool lies_as(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

/// A view of `made` with the shape of `tensor`. A view of another dtype views the bits.
at::Tensor view_like(const at::Tensor& made, c10::ScalarType stands_for, const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const bool is_of_bits = tensor.scalar_type() != stands_for;
  const at::Tensor base = is_of_bits ? made.view(tensor.scalar_type()) : made;
  if (base.sizes() == tensor.sizes() && base.strides() == tensor.strides()) return base;
  return base.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

}  // namespace

bool StandIns::is_same_content(const at::Tensor& a, const at::Tensor& b) const {
  if (per_ == Per::segment) return true;
  if (!lies_as(a, b) || a.storage_offset() != b.storage_offset()) return false;
  return per_ == Per::part || a.is_same(b) || (!a.requires_grad() && !b.requires_grad());
}

/// Fused optimizers pass lists of thousands of tensors.
StandIns::StandIn* StandIns::find(const at::Tensor& tensor) {
  const auto [first, last] = of_segment_.equal_range(segment_of(tensor));
  const auto found = std::find_if(
      first, last, [&](const auto& entry) { return is_same_content(stand_ins_[entry.second].tensor, tensor); });
  return found == last ? nullptr : &stand_ins_[found->second];
}

at::Tensor StandIns::give(const at::Tensor& tensor, bool writes, Takes takes, Make make) {
  if (!segment_of(tensor) || !takes(tensor, writes)) return tensor;
  StandIn* known = find(tensor);
  if (!known) {
    at::Tensor made = make(tensor);
    if (!made.defined()) return tensor;
    const std::int64_t version = version_of(made);
    of_segment_.emplace(segment_of(tensor), stand_ins_.size());
    known = &stand_ins_.emplace_back(StandIn{tensor, std::move(made), false, version});
  }
  known->is_written |= writes;
  at::Tensor given = per_ != Per::segment ? known->made : view_like(known->made, known->tensor.scalar_type(), tensor);
  views_.push_back({tensor, given});
  return given;
}

bool StandIns::replace(Takes takes, Make make) {
  arguments_.assign(call_.stack.begin() + static_cast<std::ptrdiff_t>(call_.first), call_.stack.end());
  for (std::size_t i = 0; i < call_.arguments; ++i) {
    c10::IValue& value = call_.argument(i);
    const bool writes = call_.info.writes[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = give(value.toTensor(), writes, takes, make);
    } else if (value.isList()) {  // may contain tensors or optional tensors
      const auto elements = value.toListRef();
      if (std::none_of(elements.begin(), elements.end(), [](const c10::IValue& e) { return e.isTensor(); })) continue;
      c10::impl::GenericList list(value.toList().elementType());
      for (const c10::IValue& element : elements) {
        list.push_back(element.isTensor() ? give(element.toTensor(), writes, takes, make) : element);
      }
      value = std::move(list);
    }
  }
  if (stand_ins_.empty()) return false;
  paged_ = std::move(call_.paged);
  call_.paged.clear();
  call_.find_paged();
  return true;
}

bool StandIns::run(c10::function_ref<bool()> run, Settle settle, MayHaveChanged may_have_changed) {
  if (stand_ins_.empty()) return run();
  bool done = false;
  try {
    done = run();
  } catch (...) {
    const c10::NoGradGuard no_grad;
    for (const StandIn& stand_in : stand_ins_) {
      if (!stand_in.is_written || !may_have_changed(stand_in.tensor, stand_in.made)) continue;
      settle(stand_in.tensor, stand_in.made);
      if (version_of(stand_in.made) != stand_in.version) bump_version(stand_in.tensor);
    }
    throw;
  }
  call_.paged = std::exchange(paged_, {});
  if (!done) {
    std::copy(arguments_.begin(), arguments_.end(), call_.stack.begin() + static_cast<std::ptrdiff_t>(call_.first));
    return false;
  }
  find_written();
  for (const StandIn& stand_in : stand_ins_) {
    if (!stand_in.is_written) continue;
    const c10::NoGradGuard no_grad;
    settle(stand_in.tensor, stand_in.made);
    bump_version(stand_in.tensor);
  }
  return_originals();
  return true;
}

/// Finds undeclared writes: run_whole() lists those to paged stand-ins, and versions show those to ordinary ones.
void StandIns::find_written() {
  for (StandIn& stand_in : stand_ins_) {
    auto* const segment = segment_of(stand_in.made);
    const auto end = call_.undeclared.end();
    if (segment) {
      stand_in.is_written |= std::find(call_.undeclared.begin(), end, segment) != end;
    } else {
      const bool is_new = version_of(stand_in.made) != stand_in.version;
      if (is_new && !stand_in.is_written) call_.undeclared.push_back(segment_of(stand_in.tensor));
      stand_in.is_written |= is_new;
    }
  }
}

void StandIns::return_originals() {
  for (std::size_t i = call_.first; i < call_.stack.size(); ++i) {
    if (!call_.stack[i].isTensor() || !call_.stack[i].toTensor().defined()) continue;
    const at::Tensor& result = call_.stack[i].toTensor();
    const auto given =
        std::find_if(views_.begin(), views_.end(), [&](const View& view) { return result.is_same(view.given); });
    if (given != views_.end()) {
      call_.stack[i] = given->original;
      continue;
    }
    // Clone a view of an ordinary stand-in, because the stand-in is temporary.
    const auto is_view = [&](const StandIn& stand_in) {
      return !segment_of(stand_in.made) && result.has_storage() && result.is_alias_of(stand_in.made);
    };
    if (std::any_of(stand_ins_.begin(), stand_ins_.end(), is_view)) call_.stack[i] = result.clone();
  }
}

}  // namespace zeropage
