#include "zeropage/rules/program.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <unordered_set>

#include "zeropage/base/errors.h"
#include "zeropage/rules/update.h"

namespace zeropage {
namespace {

constexpr std::size_t kMostSlots = 24, kMostInstructions = 256;
constexpr std::size_t kCacheElements = std::size_t{1} << 15;  // at once in a thread: some operands fit its cache

/// Operators that round once an element, so that it does not matter whether a vector loop or its scalar tail did it.
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

/// Whether windows can be cut for both kinds of operators at once: where threads' shares are whole vectors.
bool chunkings_agree(std::size_t elements) {
  const Cut chunk = chunk_of(elements, 0, Chunking::iterator, at::get_num_threads());
  return chunk.end == elements || chunk.end % kVector == 0;
}

/// A tensor of the same shape with no storage to keep alive.
at::Tensor shape_of(const at::Tensor& tensor) {
  const auto backend = c10::computeDispatchKey(std::nullopt, std::nullopt, tensor.device());
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                       c10::DataPtr(nullptr, tensor.device()), nullptr, false);
  auto shape = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                        c10::DispatchKeySet(backend), tensor.dtype());
  shape.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return shape;
}

/// What the caller may do with operators: those of programs are not its own.
c10::DispatchKeySet modes() {
  return c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                              c10::DispatchKey::PythonDispatcher, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                              c10::DispatchKey::FuncTorchDynamicLayerBackMode});
}

/// Says, while it lives, that a program runs: its operands need not wait for it.
struct Running {
  bool& flag;
  explicit Running(bool& f) : flag(f) { flag = true; }
  ~Running() { flag = false; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

class Program;
using ProgramPtr = std::shared_ptr<Program>;

class Program final : public Deferred, public std::enable_shared_from_this<Program> {
 public:
  explicit Program(std::shared_ptr<Domain> domain) : domain_(std::move(domain)) {}

  bool run() override;
  bool keep_alive(std::unique_ptr<StorageSegment>& segment) override;
  bool can_wait() const override;
  void for_each_segment(c10::function_ref<void(StorageSegment&)> visit) const override;
  Access access_to(const StorageSegment& segment) const override;
  bool runs_in_host() const override { return in_host_; }

  std::size_t length() const override { return instructions_.size(); }

  bool empty() const { return instructions_.empty(); }
  bool makes_only(const StorageSegment& segment) const;
  void run_into(const at::Tensor& target, const StorageSegment& segment);
  bool fits(std::size_t more_slots) const {
    return slots_.size() + more_slots <= kMostSlots && instructions_.size() < kMostInstructions;
  }
  bool begun() const { return progress_.done > 0; }
  std::size_t slots() const { return slots_.size(); }
  bool takes(Chunking chunking, bool any_chunking) const {
    return any_chunking || any_chunking_ || chunking == chunking_ || chunkings_agree(elements_);
  }
  bool takes_all_of(const Program& other) const { return takes(other.chunking_, other.any_chunking_); }
  void take_over(Program& other);
  int slot_of(const Operand& operand);
  int add_temporary(const at::Tensor& tensor);
  void add(Instruction instruction, Chunking chunking, bool any_chunking);

 private:
  struct Slot {
    StorageSegment* segment;                 // null: a temporary that died
    std::unique_ptr<StorageSegment> orphan;  // the segment, if its tensor died
    at::Tensor shape;
    Access access = Access::read;  // by the whole program
    bool temporary = false;        // what an instruction of the program returns
    std::size_t per = 1;
  };

  void touch(int slot, Access access);
  void drop_copies(c10::ArrayRef<int> slots);
  bool can_run_in_host() const;
  bool updates_states() const;
  void count(const at::Tensor& slice, Where where);
  void choose_where();
  std::vector<Instruction> instructions_in_host() const;
  std::optional<UpdateProgram> find_update(c10::ArrayRef<Instruction> instructions) const;
  void run_update_on(const UpdateProgram& update, c10::ArrayRef<at::Tensor> operands, c10::ArrayRef<int> operand_of);
  void run_piece(c10::ArrayRef<Instruction> instructions, c10::ArrayRef<at::Tensor> operands,
                 c10::ArrayRef<int> operand_of);
  static void run_on_registers(c10::ArrayRef<Instruction> instructions, std::vector<at::Tensor>& registers,
                               c10::ArrayRef<int> operand_of);
  void end();

  std::shared_ptr<Domain> domain_;
  std::vector<Slot> slots_;
  std::vector<Instruction> instructions_;
  std::size_t elements_ = 0;
  Chunking chunking_ = Chunking::iterator;
  bool any_chunking_ = true;  // nothing in it depends on where windows are cut
  Progress progress_;
  bool running_ = false;
  bool in_host_ = false;  // where it will run, as far as is known
};

void Program::touch(int index, Access access) {
  Slot& slot = slots_[index];
  if (access != Access::read && slot.access == Access::read) slot.access = Access::write;
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
  if (instruction.op.schema().name() == "aten::copy_") drop_copies(instruction.slots);
  if (!any_chunking) chunking_ = chunking, any_chunking_ = false;
  instructions_.push_back(std::move(instruction));
  choose_where();
}

/// Segments say where they will change.
void Program::choose_where() {
  const bool was_in_host = std::exchange(in_host_, can_run_in_host());
  if (!was_in_host && !in_host_) return;
  const auto self = shared_from_this();
  for (const Slot& slot : slots_) {
    if (slot.segment && !slot.orphan) slot.segment->defer(self);
  }
}

/// An earlier copy between the same operands, whose target no operator has used since, was for nothing.
void Program::drop_copies(c10::ArrayRef<int> slots) {
  for (auto last = instructions_.rbegin(); last != instructions_.rend(); ++last) {
    const bool same = last->op.schema().name() == "aten::copy_" && slots.equals(last->slots);
    if (same) return void(instructions_.erase(std::next(last).base()));
    if (std::find(last->slots.begin(), last->slots.end(), slots[0]) != last->slots.end()) return;
  }
}

/// The instructions of another program follow ours; the two have no operand in common.
void Program::take_over(Program& other) {
  const int shift = static_cast<int>(slots_.size());
  for (Slot& slot : other.slots_) {
    if (slot.segment && !slot.orphan) slot.segment->defer(shared_from_this());
    slots_.push_back(std::move(slot));
  }
  for (Instruction& instruction : other.instructions_) {
    for (int& slot : instruction.slots) slot += shift;
    if (instruction.result >= 0) instruction.result += shift;
    instructions_.push_back(std::move(instruction));
  }
  if (!other.any_chunking_) chunking_ = other.chunking_, any_chunking_ = false;
  other.slots_.clear();
  other.instructions_.clear();
  choose_where();
}

/// [Note: what a program holds]
bool Program::keep_alive(std::unique_ptr<StorageSegment>& segment) {
  const auto slot =
      std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.segment == segment.get(); });
  if (slot == slots_.end()) return false;
  slot->segment->defer(nullptr);  // the living segments own the program
  const at::Tensor master = slot->segment->master();
  slot->segment->set_master({});  // dies last, and comes here itself
  if (slot->temporary && !running_) {
    slot->segment = nullptr;
  } else {
    slot->orphan = std::move(segment);
  }
  const bool wanted = std::any_of(slots_.begin(), slots_.end(),
                                  [](const Slot& s) { return s.segment && !s.orphan && s.access != Access::read; });
  // Ranks must all run the same, and when tensors die may differ between them.
  if (!wanted && !running_ && !domain_->partition.ranks) end();
  return true;
}

void Program::end() {
  for (Slot& slot : slots_) {
    if (slot.segment && !slot.orphan) slot.segment->defer(nullptr);
  }
  const auto slots = std::exchange(slots_, {});  // what dies with them may come back here
  instructions_.clear();
}

bool Program::run() {
  if (running_) return false;
  if (empty()) return true;
  const auto self = shared_from_this();
  {
    Running running(running_);
    c10::SmallVector<Operand, 8> operands;
    std::vector<int> operand_of(slots_.size(), -1);
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      if (!slot.segment) continue;
      slot.segment->find_home();
      operand_of[i] = static_cast<int>(operands.size());
      const bool dropped = slot.orphan && !domain_->partition.ranks;  // what is written to it goes nowhere
      operands.push_back({slot.shape, slot.segment, dropped ? Access::read : slot.access, slot.per});
    }
    const c10::impl::ExcludeDispatchKeyGuard unseen(modes());
    in_host_ = in_host_ && can_run_in_host();
    const Where where = in_host_ ? Where::in_host : Where::on_device;
    const std::vector<Instruction> in_host = in_host_ ? instructions_in_host() : std::vector<Instruction>();
    const c10::ArrayRef<Instruction> on_cpu = in_host_ ? in_host : instructions_;
    const bool updates = domain_->cache->has_separate_memory() && updates_states();
    const auto update = in_host_ || slots_[0].shape.is_cpu() ? find_update(on_cpu) : std::nullopt;
    for_each_window(
        operands, chunking_,
        [&](c10::ArrayRef<at::Tensor> slices) {
          if (updates) count(slices[0], where);
          if (!slices[0].is_cpu()) return run_piece(instructions_, slices, operand_of);
          update ? run_update_on(*update, slices, operand_of) : run_piece(on_cpu, slices, operand_of);
        },
        &progress_, where);
  }
  end();
  return true;
}

/// [Note: updates in the host]
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

/// On the CPU with memory="separate" the slice cannot tell: a part that LowerPins refused counts as updated in the
/// host too.
void Program::count(const at::Tensor& slice, Where where) {
  const bool in_host = where == Where::in_host && slice.is_cpu();
  (in_host ? domain_->updated_in_host : domain_->updated_on_device) += slice.numel();
}

/// The same with scalars that the host can read.
std::vector<Instruction> Program::instructions_in_host() const {
  std::vector<Instruction> instructions = instructions_;
  for (Instruction& instruction : instructions) {
    for (std::size_t i = 0; i < instruction.call.arguments.size(); ++i) {
      c10::IValue& value = instruction.call.arguments[i];
      if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().is_cpu()) continue;
      const HostCopy copy = i < instruction.in_host.size() ? instruction.in_host[i] : HostCopy();
      if (copy.done) copy.done->synchronize();
      // No copy was started for a scalar of a call that was made while updates still ran on the device.
      value = copy.tensor.defined() ? copy.tensor : value.toTensor().cpu();
    }
  }
  return instructions;
}

/// Whether a living temporary is all that comes of it.
bool Program::makes_only(const StorageSegment& segment) const {
  return !running_ && !begun() && std::all_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return slot.segment == &segment ? slot.temporary : slot.access == Access::read || !slot.segment;
  });
}

/// Computes what it will make of `segment`, into another tensor.
void Program::run_into(const at::Tensor& target, const StorageSegment& segment) {
  const Running running(running_);
  const c10::impl::ExcludeDispatchKeyGuard unseen(modes());
  c10::SmallVector<Operand, 8> operands;
  std::vector<int> operand_of(slots_.size(), -1);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.segment) continue;
    const bool made = slot.segment == &segment;
    operand_of[i] = static_cast<int>(operands.size());
    operands.push_back({slot.shape, made ? segment_of(target) : slot.segment, slot.access, slot.per});
  }
  for_each_window(operands, chunking_,
                  [&](c10::ArrayRef<at::Tensor> slices) { run_piece(instructions_, slices, operand_of); });
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
  // What is joined or dequantised lives in registers alone; if a tensor still holds it, it is to be written too. (A
  // gradient can be both.)
  const auto fits = [&](int slot, bool in_registers) {
    return slot < 0 || in_registers == (slots_[slot].segment == nullptr);
  };
  if ((update->narrow < 0 && !fits(update->gradient, false)) || !fits(update->parameter, update->high >= 0))
    return std::nullopt;
  for (int i = 0; i < 3; ++i) {
    if (!fits(update->state[i], update->quantised[i].codes >= 0)) return std::nullopt;
  }
  const Slot& gradient = slots_[update->gradient];
  if (!gradient.segment || gradient.orphan) update->update.store_gradient = false;
  return update;
}

void Program::run_update_on(const UpdateProgram& update, c10::ArrayRef<at::Tensor> operands,
                            c10::ArrayRef<int> operand_of) {
  std::vector<at::Tensor> registers(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (operand_of[i] >= 0) registers[i] = operands[operand_of[i]];
  }
  domain_->not_finite += run_update(update, registers);
}

/// A part of a window, in pieces that stay in a core's cache from one instruction to the next.
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
    if (instruction.result < 0) continue;
    at::Tensor result = stack[0].isTensor() ? stack[0].toTensor() : stack[0].toTensorVector()[0];
    at::Tensor& kept = registers[instruction.result];
    operand_of[instruction.result] < 0 ? void(kept = std::move(result)) : void(kept.copy_(result));
  }
}

thread_local OneCall* current_call = nullptr;

/// What a scalar was at the call.
at::Tensor snapshot(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (segment_of(tensor)) {
    const PinRequest request{segment_of(tensor), Access::read};
    TensorPin pin(request);
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
    return tensor.clone();
  }
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
  return tensor.clone();
}

/// Starts copying what a device holds.
HostCopy copy_to_host(const at::Tensor& kept) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
  const c10::DeviceType device = kept.device().type();
  HostCopy copy{at::empty(kept.sizes(), kept.options().device(c10::kCPU).pinned_memory(true)),
                std::make_shared<c10::Event>(device)};
  copy.tensor.copy_(kept, /*non_blocking=*/true);
  copy.done->record(c10::impl::VirtualGuardImpl(device).getStream(kept.device()));
  return copy;
}

OneCall::Copy copy_of(const at::Tensor& scalar, const Domain& domain) {
  if (current_call) {
    const auto& copies = current_call->copies;
    const auto same = [&](const OneCall::Copy& copy) { return copy.original.is_same(scalar); };
    if (const auto found = std::find_if(copies.begin(), copies.end(), same); found != copies.end()) return *found;
  }
  OneCall::Copy copy{scalar, snapshot(scalar), {}};
  if (!scalar.is_cpu() && domain.offloads_updates()) copy.in_host = copy_to_host(copy.kept);
  if (current_call && current_call->copies.size() < 8) current_call->copies.push_back(copy);
  return copy;
}

bool can_be_deferred(const Substitution& call) {
  if (call.operands.empty() || scope_domain()) return false;
  const auto* first = call.operands[0].segment;
  for (const Operand& operand : call.operands) {
    if (!operand.segment || operand.segment->domain() != first->domain()) return false;
    if (operand.segment->is_pinned()) return false;  // the holder of the pin may read its memory
  }
  return true;
}

/// The program that the operands have together, or a new one. Those that cannot be joined run first.
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
  for (const ProgramPtr& program : found) {
    slots += program->slots();
    joinable = joinable && !program->begun() && program->takes(chunking, any_chunking) && program->fits(strangers);
    for (const ProgramPtr& other : found) joinable = joinable && program->takes_all_of(*other);
  }
  if (!found.empty() && joinable && slots <= kMostSlots) {
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

at::Tensor preview(const at::Tensor& tensor) {
  auto* const segment = segment_of(tensor);
  if (!has_program(segment) || !segment->is_unallocated() || !is_operand(tensor, tensor)) return {};
  if (tensor.nbytes() > segment->domain()->cache->frame_limit()) return {};  // read page by page, more than once
  const auto& domain = segment->domain();
  if (domain->partition.ranks) return {};  // which would have to make the same copies
  std::lock_guard lock(domain->deferral_mutex);
  const auto program = std::static_pointer_cast<Program>(segment->deferred());
  if (!program || !program->makes_only(*segment)) return {};
  try {
    at::Tensor copy = make_paged(domain, tensor.sizes(), tensor.strides(), tensor.dtype(), segment->role(),
                                 {.layout = segment->layout()});
    const PinRequest request{segment_of(copy), Access::overwrite};
    const TensorPin in_one_frame(request);
    program->run_into(copy, *segment);
    return copy;
  } catch (const BudgetError&) {
    return {};  // no room for both: the tensor itself is made
  }
}

std::optional<at::Tensor> defer(const c10::OperatorHandle& op, const Substitution& call, Chunking chunking,
                                std::optional<caffe2::TypeMeta> dtype) {
  if (!can_be_deferred(call)) return std::nullopt;
  const auto& domain = call.operands[0].segment->domain();
  for (const Operand& operand : call.operands) {
    // What is on its way from other ranks is waited for here: its tensor may be gone when the program runs.
    operand.segment->complete_pending();
  }
  std::lock_guard lock(domain->deferral_mutex);
  const bool any_chunking = rounds_once(op, call);
  const ProgramPtr program = program_for(call, chunking, any_chunking);
  c10::SmallVector<int, 8> slots;
  for (const Operand& operand : call.operands) slots.push_back(program->slot_of(operand));
  at::Tensor result;
  int result_slot = -1;
  const Operand& like = call.operands[0];
  if (dtype) {
    result = make_paged(domain, like.tensor.sizes(), like.tensor.strides(), *dtype, like.segment->role(),
                        {.layout = like.segment->layout(), .unallocated = true});
    result_slot = program->add_temporary(result);
  }
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
  program->add({op, std::move(kept), std::move(slots), result_slot, std::move(in_host)}, chunking, any_chunking);
  return result;
}

}  // namespace zeropage
