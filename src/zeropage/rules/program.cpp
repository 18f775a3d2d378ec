#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/trace.h"
#include "zeropage/plan/machine.h"
#include "zeropage/rules/deferred_program.h"
#include "zeropage/rules/speculation.h"

namespace zeropage {
namespace {

constexpr std::size_t kCacheElements = std::size_t{1} << 15;  // of one thread's piece: some operands fit its cache

/// Whether the same windows suit both kinds of chunking: threads' shares must be whole vectors.
bool chunkings_agree(std::size_t elements) {
  const Cut chunk = chunk_of(elements, 0, Chunking::iterator, at::get_num_threads());
  return chunk.end == elements || chunk.end % kVector == 0;
}

/// A tensor of the same shape that keeps no storage alive.
at::Tensor shape_of(const at::Tensor& tensor) {
  const auto backend = c10::computeDispatchKey(std::nullopt, std::nullopt, tensor.device());
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                       c10::DataPtr(nullptr, tensor.device()), nullptr, false);
  auto shape = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                        c10::DispatchKeySet(backend), tensor.dtype());
  shape.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return shape;
}

}  // namespace

void Program::touch(int index, Access access) {
  Slot& slot = slots_[index];
  if (access != Access::read && slot.access == Access::read) slot.access = Access::write;
}

bool Program::holds_otherwise(const Operand& operand) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return slot.segment == operand.segment && !are_alike({slot.shape, slot.segment, slot.access, slot.per}, operand);
  });
}

/// Whether memory holds pages of all slots at once: one page each, or two if a window straddles pages.
bool Program::fits(std::size_t more_slots) const {
  const std::size_t slots = slots_.size() + done_slots_ + more_slots;
  constexpr std::size_t kFew = 6;  // slots that a single operator may need anyway
  const FrameCache& cache = *domain_->cache;
  return slots <= kMostSlots && code_.instructions.size() + done_instructions_ < kMostInstructions &&
         (slots <= kFew || 2 * slots * cache.page_bytes() <= cache.frame_limit());
}

int Program::slot_of(const Operand& operand) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].segment == operand.segment) {
      touch(static_cast<int>(i), operand.access);
      return static_cast<int>(i);
    }
  }
  slots_.push_back({operand.segment, nullptr, shape_of(operand.tensor), operand.access, false, operand.per});
  operand.segment->defer(shared_from_this());
  return static_cast<int>(slots_.size()) - 1;
}

int Program::add_temporary(const at::Tensor& tensor) {
  slots_.push_back({segment_of(tensor), nullptr, shape_of(tensor), Access::overwrite, true});
  segment_of(tensor)->defer(shared_from_this());
  return static_cast<int>(slots_.size()) - 1;
}

void Program::add(Instruction instruction, Chunking chunking, bool any_chunking) {
  elements_ = slots_[0].shape.numel();
  if (instruction.kind == Instruction::Kind::zero) {
    Slot& slot = slots_[instruction.slots[0]];
    slot.zero = std::make_unique<Instruction>(std::move(instruction));
    return choose_where();
  }
  for (const int slot : instruction.slots) {
    if (const auto zero = std::move(slots_[slot].zero)) code_.instructions.push_back(std::move(*zero));
  }
  if (instruction.kind == Instruction::Kind::copy) drop_copies(instruction.slots);
  if (!any_chunking) code_.chunking = chunking, code_.any_chunking = false;
  code_.instructions.push_back(std::move(instruction));
  choose_where();
}

/// Chooses where the program runs, and tells its segments.
void Program::choose_where() {
  const bool was_in_host = std::exchange(in_host_, can_run_in_host());
  if (!was_in_host && !in_host_) return;
  const auto self = shared_from_this();
  for (const Slot& slot : slots_) {
    if (slot.is_alive()) slot.segment->defer(self);
  }
}

/// Drops an earlier copy between the same operands if no operator has used its target since.
void Program::drop_copies(c10::ArrayRef<int> slots) {
  for (auto last = code_.instructions.rbegin(); last != code_.instructions.rend(); ++last) {
    const bool same = last->kind == Instruction::Kind::copy && slots.equals(last->slots);
    if (same) return void(code_.instructions.erase(std::next(last).base()));
    if (std::find(last->slots.begin(), last->slots.end(), slots[0]) != last->slots.end()) return;
  }
}

/// Appends the instructions of another program. The two have no operand in common.
void Program::take_over(Program& other) {
  const int shift = static_cast<int>(slots_.size());
  for (Slot& slot : other.slots_) {
    if (slot.is_alive()) slot.segment->defer(shared_from_this());
    if (slot.zero) slot.zero->slots[0] += shift;
    slots_.push_back(std::move(slot));
  }
  for (Instruction& instruction : other.code_.instructions) {
    for (int& slot : instruction.slots) slot += shift;
    if (instruction.result >= 0) instruction.result += shift;
    code_.instructions.push_back(std::move(instruction));
  }
  if (!other.code_.any_chunking) code_.chunking = other.code_.chunking, code_.any_chunking = false;
  other.slots_.clear();
  other.code_.instructions.clear();
  choose_where();
}

/// Keeps a dead tensor's segment ([Note: what a program holds]).
bool Program::keep_alive(std::unique_ptr<StorageSegment>& segment) {
  const auto slot =
      std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.segment == segment.get(); });
  if (slot == slots_.end()) return false;
  slot->segment->defer(nullptr);  // the living segments own the program
  const at::Tensor master = slot->segment->master();
  slot->segment->set_master({});  // `master` dies last, and calls this function itself
  if (slot->temporary && !running_) {
    slot->segment = nullptr;
  } else {
    slot->orphan = std::move(segment);
  }
  // Not over ranks: all ranks must run the same operators, but tensors may die at different times.
  if (!is_wanted() && !running_ && !domain_->partition.ranks) end();
  if (!running_ && only_makes_what_is_dead()) {
    done_instructions_ += code_.instructions.size();
    code_.instructions.clear();
    drop_unused_slots();
  }
  return true;
}

bool Program::is_used(int slot) const {
  return std::ranges::any_of(code_.instructions, [&](const Instruction& instruction) {
    return instruction.result == slot || std::ranges::count(instruction.slots, slot) > 0;
  });
}

/// Whether what an early update left to it, such as the scaling of a gradient, is of no use any more.
bool Program::only_makes_what_is_dead() const {
  const auto is_updated = [](const Slot& slot) { return slot.is_updated; };
  if (code_.instructions.empty() || begun() || std::ranges::none_of(slots_, is_updated)) return false;
  return std::ranges::all_of(code_.instructions, [&](const Instruction& instruction) {
    const bool result_is_dead = instruction.result < 0 || !slots_[instruction.result].is_alive();
    return result_is_dead && std::ranges::all_of(instruction.slots, [&](int slot) {
             return slot < 0 || !(slots_[slot].is_alive() || slots_[slot].is_updated);
           });
  });
}

bool Program::is_wanted() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.is_alive() && slot.access != Access::read; });
}

void Program::end(std::exception_ptr failure) {
  close_stream();
  for (Slot& slot : slots_) {
    if (slot.is_alive()) slot.segment->defer(nullptr, slot.access == Access::read ? nullptr : failure);
  }
  const auto slots = std::exchange(slots_, {});  // destructors of its tensors may call us again
  code_.instructions.clear();
}

Program::Program(std::shared_ptr<Domain> domain, std::vector<Slot> slots, Code code)
    : domain_(std::move(domain)), slots_(std::move(slots)), code_(std::move(code)), settled_(true) {
  elements_ = slots_[0].shape.numel();
}

bool Program::takes(Chunking chunking, bool any_chunking) const {
  return any_chunking || code_.any_chunking || chunking == code_.chunking || chunkings_agree(elements_);
}

void Program::settle() {
  if (domain_->early_update == EarlyUpdate::never) return;
  if (running_ || begun() || std::exchange(settled_, true)) return;
  settle_update(*this);
}

/// [Note: where ranks update alike] Ranks gather the same tensors at the same places of the program, and a rule that
/// writes shares drops frames of the gathered ones. An early update does not, because other ranks may have none. The
/// program, now without these instructions, stays until an operator needs one of its tensors, and drops the frames
/// there.
void Program::keep(c10::ArrayRef<std::size_t> indices, c10::ArrayRef<int> updated) {
  std::vector<Instruction> instructions;
  for (const std::size_t i : indices) instructions.push_back(std::move(code_.instructions[i]));
  if (domain_->partition.ranks) {
    done_instructions_ += code_.instructions.size() - instructions.size();
    for (const int slot : updated) {
      slots_[slot].is_updated = true;
      slots_[slot].access = Access::write;  // operators that join the program may read what the update made
    }
  }
  code_.instructions = std::move(instructions);
  drop_unused_slots();
}

void Program::drop_unused_slots() {
  std::vector<int> place(slots_.size(), -1);
  for (const Instruction& instruction : code_.instructions) {
    for (const int slot : instruction.slots) place[slot] = 0;
    if (instruction.result >= 0) place[instruction.result] = 0;
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (is_zeroed(slots_[i]) || slots_[i].is_updated) place[i] = 0;
  }
  std::vector<Slot> kept, dropped;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (place[i] == 0) {
      place[i] = static_cast<int>(kept.size());
      if (slots_[i].zero) slots_[i].zero->slots[0] = place[i];
      kept.push_back(std::move(slots_[i]));
    } else {
      if (slots_[i].is_alive()) slots_[i].segment->defer(nullptr);
      dropped.push_back(std::move(slots_[i]));
    }
  }
  if (domain_->partition.ranks) done_slots_ += dropped.size();
  slots_ = std::move(kept);
  for (Instruction& instruction : code_.instructions) {
    for (int& slot : instruction.slots) slot = place[slot];
    if (instruction.result >= 0) instruction.result = place[instruction.result];
  }
  if (!is_wanted()) end();
}

namespace {

bool is_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) || dynamic_cast<const c10::OutOfMemoryError*>(&error)) return true;
  // The CPU's allocator has no class for its error.
  const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch && of_torch->msg().find("can't allocate memory") != std::string::npos;
}

}  // namespace

bool Program::run() {
  if (running_) return false;
  const auto self = shared_from_this();
  settle();
  discard_ahead(*this);
  if (empty()) return true;
  {
    const TraceSpan span("update", "update");
    const Booking booking(&domain_->cache->booked(), Spent::updates);
    progress_.waits = true, progress_.windows = SIZE_MAX;
    hurry_stream();
    for (const Slot& slot : slots_) {
      if (slot.is_updated && slot.per == 1) slot.segment->claim_share(Access::write);
    }
    if (!code_.instructions.empty()) run_or_end();
    zero_at_the_end();
  }
  end();
  return true;
}

/// Only in one process, and without a device that has its own memory.
bool Program::can_open() const {
  return !running_ && !progress_.is_streamed && !code_.instructions.empty() && !in_host_ &&
         !domain_->partition.ranks && !domain_->planned_on && !domain_->cache->has_separate_memory();
}

void Program::open() {
  if (!can_open()) return;
  const auto self = shared_from_this();
  settle();
  discard_ahead(*this);
  if (!can_open()) return;
  domain_->opened.reserve(domain_->opened.size() + 1);
  open_stream();
  if (!std::exchange(will_open_, false)) domain_->opened.push_back(weak_from_this());
  domain_->has_opened.store(true, std::memory_order_release);
}

void Program::open_when_idle(const std::shared_ptr<void>& update_habit) {
  constexpr int kMost = 4;  // of lookups without a backward, such as in an evaluation: then it need not wait
  looked_up_ = update_habit;
  if (will_open_ && last_look_ && ++last_look_->lookups == kMost) last_look_.reset();
  if (!can_open() || will_open_) return;
  open_from_next_operator(DiskLook{Clock::now(), domain_->cache->stats().disk_seconds, domain_->arrivals});
}

void Program::open_if_large() {
  if (domain_->cache->holds_everything()) return;
  std::size_t bytes = 0;
  for_each_segment([&](const StorageSegment& segment) { bytes += segment.bytes(); });
  if (bytes > domain_->cache->most_read_ahead()) open_from_next_operator({});
}

void Program::open_from_next_operator(std::optional<DiskLook> first_look) {
  if (!can_open() || will_open_) return;
  domain_->opened.push_back(weak_from_this());
  will_open_ = true;
  last_look_ = first_look;
  domain_->has_opened.store(true, std::memory_order_release);
}

/// Whether the disk was idle for most of the time since the last look. Once gradients arrive, the next one of its
/// parameter may need the program soon.
bool Program::disk_has_time() {
  constexpr double kLookAfter = 0.1;  // seconds
  if (domain_->leaves_updates) return domain_->portions() % 2 == 0;
  if (!last_look_ || domain_->arrivals != last_look_->arrivals) return true;
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_look_->at).count();
  if (seconds < kLookAfter) return false;
  const double busy = domain_->cache->stats().disk_seconds, before = last_look_->busy_seconds;
  last_look_->at = now, last_look_->busy_seconds = busy;
  return busy - before < seconds / 2;
}

void Program::open_stream() {
  std::vector<int> operand_of(slots_.size(), -1);
  const auto used = operands(find_update(code_.instructions).has_value(), operand_of);
  c10::SmallVector<PinRequest, 8> requests;
  for (const Operand& operand : used) requests.push_back({operand.segment, operand.access});
  domain_->cache->open_stream(requests);
  for (const Operand& operand : used) reach_in_stream(operand, progress_.done);
  sealed_ = true;
  progress_.is_streamed = true;
}

/// An operator waits for it.
void Program::hurry_stream() {
  if (!progress_.is_streamed) return;
  for_each_segment([&](const StorageSegment& segment) { domain_->cache->hurry_stream(segment); });
}

/// Whether an operator will use a parameter that it writes, as far as the plan knows.
bool Program::is_used_whole() const {
  return std::ranges::any_of(slots_, [&](const Slot& slot) {
    return slot.is_alive() && slot.segment->role() == Role::parameter && slot.access != Access::read &&
           domain_->cache->expects_use(*slot.segment);
  });
}

void Program::close_stream() noexcept {
  if (!std::exchange(progress_.is_streamed, false)) return;
  for (const Slot& slot : slots_) {
    if (!slot.segment || slot.segment->is_unallocated()) continue;
    const PinRequest request{slot.segment, Access::read};
    domain_->cache->close_stream({&request, 1});
  }
}

bool Program::advance(bool may_begin) {
  if (running_) return false;
  if (will_open_) {
    if (!may_begin || !disk_has_time()) return true;
    try {
      open();
    } catch (const std::exception&) {  // then it runs when it is needed, and meets the error there if it is real
      will_open_ = false;
    }
  }
  if (!progress_.is_streamed) return true;  // it has ended, or could not be opened
  const auto self = shared_from_this();
  const Booking booking(&domain_->cache->booked(), Spent::updates);
  const auto begin = Trace::is_on() ? Trace::Clock::now() : Trace::Time();
  const std::size_t done = progress_.done;
  progress_.waits = domain_->leaves_updates && domain_->portions() % 2 == 0;
  if (domain_->leaves_updates) progress_.windows = domain_->portions() % 3;
  const bool ended = run_or_end();
  if (begin != Trace::Time() && progress_.done > done) {
    Trace::span("update", "update in between", begin, Trace::Clock::now());
  }
  if (!ended) return false;
  if (!is_used_whole()) note_only_looked_up(looked_up_.lock());
  zero_at_the_end();
  end();
  return true;
}

void Program::zero_at_the_end() {
  const Running running(running_);
  for (const Slot& slot : slots_) {
    if (!is_zeroed(slot) || !slot.is_alive()) continue;
    slot.segment->find_home();
    slot.segment->zero();
  }
}

/// Runs the program, and returns whether it ran to its end. After an error of memory, disk or ranks, the next run()
/// resumes. An operator's own error would recur forever, so it ends the program.
bool Program::run_or_end() {
  try {
    return execute();
  } catch (const Error&) {
    throw;
  } catch (const std::system_error&) {
    throw;
  } catch (const std::exception& error) {
    const bool is_half_done = is_of_memory(error);
    if (is_half_done && written_window_ != progress_.done) throw;
    // A copy for others that wait: a Python error can be raised only once.
    const Error failure(fmt::format(
        "a deferred update of a tensor [{}] failed, which has changed some of its elements and not the others: {}",
        fmt::join(slots_[0].shape.sizes(), ", "), error.what()));
    end(std::make_exception_ptr(failure));
    if (is_half_done) throw Error(fmt::format("{}; load a checkpoint, and leave more memory free", failure.what()));
    throw;
  }
}

bool Program::execute() {
  const Running running(running_);
  written_window_ = SIZE_MAX;
  const OutsideModes unseen;
  in_host_ = in_host_ && can_run_in_host();
  const Where where = in_host_ ? Where::in_host : Where::on_device;
  const bool is_planned = domain_->planned_on != nullptr;
  const std::vector<Instruction> in_host =
      in_host_ && !is_planned ? instructions_in_host() : std::vector<Instruction>();
  const c10::ArrayRef<Instruction> on_cpu = in_host_ ? in_host : code_.instructions;
  const bool updates = domain_->cache->has_separate_memory() && updates_states();
  const bool on_host = (in_host_ || slots_[0].shape.is_cpu()) && !is_planned;
  const auto update = on_host ? find_update(on_cpu) : std::nullopt;
  std::vector<int> operand_of(slots_.size(), -1);
  const auto used = operands(update.has_value(), operand_of);
  const auto run = [&](c10::ArrayRef<at::Tensor> slices) {
    if (updates) count(slices[0], where);
    if (is_planned) return plan_update(slices, used);
    if (!slices[0].is_cpu()) return run_piece(code_.instructions, slices, operand_of);
    update ? run_update_on(*update, slices, operand_of) : run_piece(on_cpu, slices, operand_of);
  };
  return for_each_window(used, code_.chunking, run, &progress_, where);
}

/// The slots that have memory. `leaves_gradient`: the kernel of an update leaves a gradient that it need not store as
/// it is.
c10::SmallVector<Operand, 8> Program::operands(bool leaves_gradient, std::vector<int>& operand_of) {
  c10::SmallVector<Operand, 8> operands;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.segment || (slot.temporary && is_zeroed(slot))) continue;
    if (slot.is_updated && !is_used(static_cast<int>(i))) continue;
    slot.segment->find_home();
    operand_of[i] = static_cast<int>(operands.size());
    const bool dropped = slot.orphan && !domain_->partition.ranks;  // nothing will read it
    const bool unchanged = is_zeroed(slot) && (leaves_gradient || !is_changed(static_cast<int>(i)));
    operands.push_back({slot.shape, slot.segment, dropped || unchanged ? Access::read : slot.access, slot.per});
  }
  return operands;
}

/// Whether an instruction writes the slot. Its zeroing at the end does not count.
bool Program::is_changed(int slot) const {
  return std::ranges::any_of(code_.instructions, [&](const Instruction& instruction) {
    for (std::size_t i = 0; i < instruction.slots.size(); ++i) {
      if (instruction.slots[i] == slot && instruction.writes[i]) return true;
    }
    return instruction.result == slot;
  });
}

/// Charges a planned machine for the bytes that the update of these slices reads and writes.
void Program::plan_update(c10::ArrayRef<at::Tensor> slices, c10::ArrayRef<Operand> operands) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const bool reads = operands[i].access != Access::overwrite, writes = operands[i].access != Access::read;
    bytes += slices[i].nbytes() * (reads + writes);
  }
  domain_->planned_on->update(bytes, slices[0].is_cpu());
}

/// Whether the host can run it ([Note: updates in the host]).
bool Program::can_run_in_host() const {
  if (!domain_->offloads_updates()) return false;
  bool updates = false;
  for (const Slot& slot : slots_) {
    if (!slot.segment || slot.temporary || slot.segment->is_unallocated()) continue;
    if (!reaches_host(*slot.segment)) return false;
    if (slot.segment->role() != Role::optimizer) continue;
    if (slot.segment->at_home().tier() == Tier::device) return false;
    updates = true;
  }
  return updates;
}

bool Program::updates_states() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.segment && slot.segment->role() == Role::optimizer && slot.access != Access::read;
  });
}

/// Counts updated elements. On the CPU with memory="separate", a part that LowerPins refused also counts as updated
/// in the host, because its slice looks the same.
void Program::count(const at::Tensor& slice, Where where) {
  const bool in_host = where == Where::in_host && slice.is_cpu();
  (in_host ? domain_->updated_in_host : domain_->updated_on_device) += slice.numel();
}

/// The instructions with scalars that the host can read.
std::vector<Instruction> Program::instructions_in_host() const {
  std::vector<Instruction> instructions = code_.instructions;
  for (Instruction& instruction : instructions) {
    for (std::size_t i = 0; i < instruction.call.arguments.size(); ++i) {
      c10::IValue& value = instruction.call.arguments[i];
      if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().is_cpu()) continue;
      const HostCopy copy = i < instruction.in_host.size() ? instruction.in_host[i] : HostCopy();
      const Booking waits(Spent::device);
      if (copy.done) copy.done->synchronize();
      // A scalar has no copy if its call came while updates still ran on the device.
      value = copy.tensor.defined() ? copy.tensor : value.toTensor().cpu();
    }
  }
  return instructions;
}

/// Whether the program makes nothing else that is alive but this temporary.
bool Program::makes_only(const StorageSegment& segment) const {
  return !running_ && !begun() && std::all_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    if (slot.segment == &segment) return slot.temporary && !is_zeroed(slot);
    return slot.access == Access::read || !slot.segment;
  });
}

/// Computes the future content of `segment` into another tensor.
void Program::run_into(const at::Tensor& target, const StorageSegment& segment) {
  const Running running(running_);
  const OutsideModes unseen;
  c10::SmallVector<Operand, 8> operands;
  std::vector<int> operand_of(slots_.size(), -1);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.segment) continue;
    const bool made = slot.segment == &segment;
    operand_of[i] = static_cast<int>(operands.size());
    operands.push_back({slot.shape, made ? segment_of(target) : slot.segment, slot.access, slot.per});
  }
  for_each_window(operands, code_.chunking,
                  [&](c10::ArrayRef<at::Tensor> slices) { run_piece(code_.instructions, slices, operand_of); });
}

bool Program::can_wait() const {
  return !running_ && !begun() && std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.access == Access::read || slot.temporary;
  });
}

void Program::for_each_segment(c10::function_ref<void(StorageSegment&)> visit) const {
  for (const Slot& slot : slots_) {
    if (slot.segment && !slot.segment->is_unallocated()) visit(*slot.segment);
  }
}

bool Program::writes_shares() const {
  return std::ranges::all_of(slots_, [](const Slot& slot) {
    return slot.access == Access::read || slot.temporary || !slot.segment || slot.segment->is_shareable() ||
           slot.segment->is_of_share;
  });
}

bool Program::writes(const StorageSegment& segment) const {
  return std::ranges::any_of(
      slots_, [&](const Slot& slot) { return slot.segment == &segment && slot.access != Access::read; });
}

Access Program::access_to(const StorageSegment& segment) const {
  if (begun() || running_) return Access::read;
  for (const Slot& slot : slots_) {
    if (slot.segment == &segment) return slot.access;
  }
  return Access::read;
}

std::optional<UpdateProgram> Program::find_update(c10::ArrayRef<Instruction> instructions) const {
  auto update = as_update(instructions, [&](int slot) { return slots_[slot].shape.scalar_type(); });
  if (!update) return std::nullopt;
  // The kernel keeps joined and dequantised values only in registers, so no tensor may still hold one. (A gradient
  // may be in registers and in a tensor.)
  const auto fits = [&](int slot, bool in_registers) {
    return slot < 0 || in_registers == (slots_[slot].segment == nullptr);
  };
  if ((update->narrow < 0 && !fits(update->gradient, false)) || !fits(update->parameter, update->high >= 0))
    return std::nullopt;
  for (int i = 0; i < 3; ++i) {
    if (!fits(update->state[i], update->quantised[i].codes >= 0)) return std::nullopt;
  }
  const Slot& gradient = slots_[update->gradient];
  if (!gradient.is_alive() || is_zeroed(gradient)) update->update.store_gradient = false;
  return update;
}

void Program::run_update_on(const UpdateProgram& update, c10::ArrayRef<at::Tensor> operands,
                            c10::ArrayRef<int> operand_of) {
  std::vector<at::Tensor> registers(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (operand_of[i] >= 0) registers[i] = operands[operand_of[i]];
  }
  written_window_ = progress_.done;
  domain_->not_finite += run_update(update, registers);
}

/// Runs a part of a window in pieces that stay in a core's cache from one instruction to the next.
void Program::run_piece(c10::ArrayRef<Instruction> instructions, c10::ArrayRef<at::Tensor> operands,
                        c10::ArrayRef<int> operand_of) {
  const auto elements = static_cast<std::size_t>(operands[0].numel());
  const std::size_t step = operands[0].is_cpu() && instructions.size() > 1 ? kCacheElements : elements;
  std::vector<at::Tensor> registers(slots_.size());
  for (std::size_t begin = 0; begin < elements; begin += step) {
    const std::size_t length = std::min(step, elements - begin);
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (operand_of[i] < 0) {
        registers[i].reset();
      } else if (length == elements) {
        registers[i] = operands[operand_of[i]];
      } else {
        const at::Tensor& whole = operands[operand_of[i]];
        const std::size_t per = slots_[i].per;
        auto* data = static_cast<std::byte*>(whole.mutable_data_ptr()) + begin / per * whole.itemsize();
        const auto items = static_cast<std::int64_t>(ceil_div(length, per));
        registers[i] = at::from_blob(data, {items}, [](void*) {}, whole.options(), whole.device());
      }
    }
    run_on_registers(instructions, registers, operand_of);
  }
}

void Program::run_on_registers(c10::ArrayRef<Instruction> instructions, std::vector<at::Tensor>& registers,
                               c10::ArrayRef<int> operand_of) {
  c10::SmallVector<at::Tensor, 8> slices;
  for (const Instruction& instruction : instructions) {
    slices.clear();
    for (const int slot : instruction.slots) slices.push_back(registers[slot]);
    auto stack = instruction.call.stack(slices);
    call_below(instruction.op, stack);
    for (std::size_t i = 0; i < instruction.writes.size(); ++i) {
      if (instruction.writes[i] && operand_of[instruction.slots[i]] >= 0) written_window_ = progress_.done;
    }
    if (instruction.result < 0) continue;
    at::Tensor result = stack[0].isTensor() ? stack[0].toTensor() : stack[0].toTensorVector()[0];
    at::Tensor& kept = registers[instruction.result];
    operand_of[instruction.result] < 0 ? void(kept = std::move(result)) : void(kept.copy_(result));
  }
}

}  // namespace zeropage
