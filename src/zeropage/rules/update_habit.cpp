#include "zeropage/rules/update_habit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>

namespace zeropage {
namespace {

constexpr double kLargestInteger = 9007199254740992.0;  // doubles are exact up to 2 ** 53

/// Appends the numbers in an argument. False if it holds anything else.
bool append_numbers(const c10::IValue& value, std::vector<double>& numbers) {
  if (value.isNone()) return true;
  if (value.isBool()) {
    numbers.push_back(value.toBool());
  } else if (value.isInt()) {
    numbers.push_back(static_cast<double>(value.toInt()));
    return std::abs(numbers.back()) <= kLargestInteger;
  } else if (value.isDouble()) {
    numbers.push_back(value.toDouble());
  } else if (value.isString()) {
    for (const char c : value.toStringRef()) numbers.push_back(c);
  } else if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return true;
    if (tensor.is_meta() && tensor.numel() == 1)
      return numbers.push_back(1), true;  // planned: no gradient is clipped
    if (tensor.numel() != 1 || !tensor.is_cpu() || tensor.is_complex()) return false;
    const OutsideModes unseen;
    numbers.push_back(tensor.item<double>());
  } else if (value.isList()) {
    const auto list = value.toListRef();
    return std::all_of(list.begin(), list.end(), [&](const c10::IValue& e) { return append_numbers(e, numbers); });
  } else {
    return false;
  }
  return true;
}

/// Replaces the numbers in an argument by the next ones at `number`.
void put_numbers(c10::IValue& value, const double*& number) {
  if (value.isBool()) {
    value = *number++ != 0;
  } else if (value.isInt()) {
    value = static_cast<std::int64_t>(*number++);
  } else if (value.isDouble()) {
    value = *number++;
  } else if (value.isString()) {
    number += value.toStringRef().size();
  } else if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor& of_program = value.toTensor();
    const OutsideModes unseen;
    at::Tensor tensor = of_program.clone().fill_(*number++);
    tensor.unsafeGetTensorImpl()->set_wrapped_number(of_program.unsafeGetTensorImpl()->is_wrapped_number());
    value = std::move(tensor);
  } else if (value.isList()) {
    c10::impl::GenericList list(value.toList().elementType());
    for (c10::IValue element : value.toListRef()) {
      put_numbers(element, number);
      list.push_back(std::move(element));
    }
    value = std::move(list);
  }
}

/// Whether it is slot *= number, or /=.
bool is_factor(const Instruction& instruction, int slot) {
  return instruction.kind == Instruction::Kind::scale && instruction.slots[0] == slot;
}

bool uses(const Instruction& instruction, int slot) {
  return std::find(instruction.slots.begin(), instruction.slots.end(), slot) != instruction.slots.end();
}

/// Whether two arguments differ in numbers alone.
bool same_kind(const c10::IValue& a, const c10::IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  if (a.isString()) return a.toStringRef() == b.toStringRef();
  if (a.isTensor()) {
    const at::Tensor &x = a.toTensor(), &y = b.toTensor();
    return x.defined() == y.defined() && (!x.defined() || x.scalar_type() == y.scalar_type());
  }
  if (!a.isList()) return true;
  const auto x = a.toListRef(), y = b.toListRef();
  return std::equal(x.begin(), x.end(), y.begin(), y.end(), same_kind);
}

}  // namespace

bool same_code(c10::ArrayRef<Instruction> a, c10::ArrayRef<Instruction> b,
               c10::function_ref<bool(int, int)> same_slot) {
  if (a.size() != b.size()) return false;
  std::map<int, int> other;  // slots of b, by those of a
  const auto same = [&](int slot, int other_slot) {
    if (slot < 0 || other_slot < 0) return slot < 0 && other_slot < 0;
    const auto [known, is_new] = other.emplace(slot, other_slot);
    return known->second == other_slot && (!is_new || same_slot(slot, other_slot));
  };
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].op.operator_name() != b[i].op.operator_name() || a[i].slots.size() != b[i].slots.size() ||
        a[i].call.operand_of != b[i].call.operand_of || !same(a[i].result, b[i].result)) {
      return false;
    }
    const auto &x = a[i].call.arguments, &y = b[i].call.arguments;
    if (!std::equal(x.begin(), x.end(), y.begin(), y.end(), same_kind)) return false;
    for (std::size_t j = 0; j < a[i].slots.size(); ++j) {
      if (!same(a[i].slots[j], b[i].slots[j])) return false;
    }
  }
  return true;
}

double NumberHabit::next(const StepNumbers& numbers) const {
  const auto same = static_cast<std::size_t>(std::countr_zero(same_as_));
  return same < numbers.size() ? numbers[same] : last_ + change_;
}

bool NumberHabit::note(double value, const StepNumbers& numbers) {
  const bool expected = seen_ && next(numbers) == value;
  for (std::size_t i = 0; i < 64; ++i) {
    if (i >= numbers.size() || numbers[i] != value) same_as_ &= ~(std::uint64_t{1} << i);
  }
  change_ = seen_ ? value - last_ : 0;
  last_ = value;
  seen_ = true;
  return expected;
}

namespace {

/// The slot of the gradient from backward: one that only factors change. (A state that an optimizer cloned from a
/// gradient has its role.) -1: there is none, or more than one.
int find_gradient(const Program& program) {
  const auto& slots = program.slots();
  std::vector<char> changes(slots.size(), false);
  for (const Instruction& instruction : program.code().instructions) {
    const auto& writes = instruction.writes;
    for (std::size_t i = 0; i < writes.size(); ++i) {
      if (writes[i] && !is_factor(instruction, instruction.slots[i])) changes[instruction.slots[i]] = true;
    }
  }
  int found = -1;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].temporary || changes[i] || slots[i].segment->role() != Role::gradient) continue;
    if (found >= 0) return -1;
    found = static_cast<int>(i);
  }
  return found;
}

/// Separates instructions that make the gradient from those that use it. False if one changes it after a use.
bool divide(const Program& program, ParameterUpdate& update) {
  int gradient = update.gradient;  // as the optimizer sees it
  bool taken = false;
  const auto& instructions = program.code().instructions;
  for (std::size_t i = 0; i < instructions.size(); ++i) {
    const Instruction& instruction = instructions[i];
    if (instruction.kind == Instruction::Kind::widen && instruction.slots[0] == gradient) {
      if (taken || gradient != update.gradient) return false;
      gradient = instruction.result;
      update.making.push_back(i);
      update.rest.insert(update.rest.begin(), instruction);
    } else if (is_factor(instruction, gradient)) {
      if (taken) return false;
      std::vector<double> factor;
      for (const c10::IValue& argument : instruction.call.arguments) {
        if (!append_numbers(argument, factor)) return false;
      }
      update.all_factors_are_one &= factor.size() == 1 && factor[0] == 1;
      update.making.push_back(i);
    } else {
      taken = taken || uses(instruction, gradient);
      update.rest.push_back(instruction);
    }
  }
  return true;
}

}  // namespace

std::optional<ParameterUpdate> as_update_of_parameter(const Program& program) {
  const auto& slots = program.slots();
  ParameterUpdate update;
  update.gradient = find_gradient(program);
  if (update.gradient < 0 || !divide(program, update)) return std::nullopt;
  for (const Instruction& instruction : update.rest) {
    const auto& writes = instruction.writes;
    for (std::size_t i = 0; i < writes.size(); ++i) {
      const int slot = instruction.slots[i];
      if (!writes[i]) continue;
      if (slots[slot].temporary == slots[slot].is_alive()) return std::nullopt;  // a live temporary, or a dead tensor
      if (slots[slot].temporary) continue;
      if (std::find(update.written.begin(), update.written.end(), slot) == update.written.end()) {
        update.written.push_back(slot);
      }
    }
    // The update must make temporaries that a tensor still holds.
    const bool makes_gradient = instruction.kind == Instruction::Kind::widen;
    if (instruction.result >= 0 && !makes_gradient && slots[instruction.result].is_alive()) return std::nullopt;
    for (const c10::IValue& argument : instruction.call.arguments) {
      if (!append_numbers(argument, update.numbers)) return std::nullopt;
    }
  }
  for (const int slot : update.written) {
    if (slots[slot].segment->role() != Role::parameter) continue;
    if (update.parameter) return std::nullopt;
    update.parameter = slots[slot].segment;
  }
  return update.parameter ? std::optional(std::move(update)) : std::nullopt;
}

bool UpdateHabit::has_same_shape(const Program& program, const ParameterUpdate& update) const {
  return same_code(code_.instructions, update.rest, [&](int slot, int other) {
    const Program::Slot& its = program.slots()[other];
    if (slots_[slot].lasts == its.temporary) return false;
    if (slot == gradient_ || other == update.gradient) return slot == gradient_ && other == update.gradient;
    return its.temporary || slots_[slot].address == its.segment->virtual_address();
  });
}

void UpdateHabit::learn(const Program& program, const ParameterUpdate& update) {
  const StepNumbers none;
  const StepNumbers& known = numbers ? *numbers : none;
  const bool same = has_same_shape(program, update) && habits_.size() == update.numbers.size();
  if (!same) habits_.assign(update.numbers.size(), {});
  settled_ = same;
  for (std::size_t i = 0; i < habits_.size(); ++i) settled_ &= habits_[i].note(update.numbers[i], known);
  slots_.clear();
  for (std::size_t i = 0; i < program.slots().size(); ++i) {
    const Program::Slot& slot = program.slots()[i];
    const bool lasts = !slot.temporary;
    // The update only reads what the program clears after it.
    const bool writes = !lasts || std::ranges::count(update.written, static_cast<int>(i)) > 0;
    slots_.push_back(
        {.shape = slot.shape, .access = writes ? slot.access : Access::read, .lasts = lasts, .per = slot.per});
    if (!lasts) continue;
    if (slot.is_alive()) slots_.back().storage = slot.segment->storage();
    slots_.back().address = slot.segment->virtual_address();
  }
  code_ = {update.rest, program.code().chunking, program.code().any_chunking};
  gradient_ = update.gradient;
  written_ = update.written;
  asleep_ = update.all_factors_are_one;
  if (asleep_) backoff_.pass();
  arrivals_a_step = std::max(1, std::exchange(arrivals, 0));
  if (only_looked_up > 0) --only_looked_up;
}

std::optional<ExpectedUpdate> UpdateHabit::expected(const std::shared_ptr<Domain>& domain, StorageSegment& gradient,
                                                    const StepNumbers& next) const {
  ExpectedUpdate update;
  std::vector<Program::Slot> slots;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    StorageSegment* segment = static_cast<int>(i) == gradient_ ? &gradient : nullptr;
    if (slot.lasts && !segment) {
      auto storage = slot.storage.lock();
      segment = storage ? segment_of(*storage) : nullptr;
      if (!segment || segment->virtual_address() != slot.address || segment->is_deferred() ||
          segment->is_unallocated()) {
        return std::nullopt;
      }
      update.storages.push_back(std::move(storage));
    }
    const Access access = static_cast<int>(i) == gradient_ ? Access::read : slot.access;
    slots.push_back({segment, nullptr, slot.shape, access, !slot.lasts, slot.per});
  }
  for (const NumberHabit& habit : habits_) update.numbers.push_back(habit.next(next));
  Program::Code code = code_;
  const double* number = update.numbers.data();
  for (Instruction& instruction : code.instructions) {
    for (c10::IValue& argument : instruction.call.arguments) put_numbers(argument, number);
  }
  std::vector<double> put;  // the numbers that the arguments could hold
  for (const Instruction& instruction : code.instructions) {
    for (const c10::IValue& argument : instruction.call.arguments) {
      if (!append_numbers(argument, put)) return std::nullopt;
    }
  }
  if (put != update.numbers) return std::nullopt;
  update.program = std::make_shared<Program>(domain, std::move(slots), std::move(code));
  for (const int slot : written_) update.written.push_back(update.program->slots()[slot].segment);
  return update;
}

}  // namespace zeropage
