// One program: the operators deferred on tensors of one shape, and how they run (program.h says what programs are
// for).
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "zeropage/base/clock.h"
#include "zeropage/rules/program.h"
#include "zeropage/rules/update.h"

namespace zeropage {

/// Marks a program as running while it lives: its operands need not wait for it.
struct Running {
  bool& flag;
  explicit Running(bool& f) : flag(f) { flag = true; }
  ~Running() { flag = false; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

// [Note: zeroed at the end] After the step, zero_grad(set_to_none=False) clears gradients that the program reads.
// Such an instruction is kept apart from the others. Once they have run, the segment becomes zero without a transfer.
// If the kernel of an update reads the gradient, it need not store what clipping made of it. If another instruction
// on the slot follows, the zeroing becomes an instruction like any other.

class Program final : public Deferred, public std::enable_shared_from_this<Program> {
 public:
  struct Slot {
    StorageSegment* segment;                 // null: a temporary that died.
    std::unique_ptr<StorageSegment> orphan;  // the segment, if its tensor died.
    at::Tensor shape;
    Access access = Access::read;  // by the whole program
    bool temporary = false;        // the result of one of the program's instructions
    std::size_t per = 1;
    std::unique_ptr<Instruction> zero = nullptr;  // [Note: zeroed at the end]
    bool is_updated = false;                      // early, and only over ranks: [Note: where ranks update alike]

    /// Whether a tensor may still read its content.
    bool is_alive() const { return segment && !orphan; }
  };
  /// The instructions, without tensors.
  struct Code {
    std::vector<Instruction> instructions;
    Chunking chunking = Chunking::iterator;
    bool any_chunking = true;  // no result depends on the boundaries of windows
  };

  explicit Program(std::shared_ptr<Domain> domain) : domain_(std::move(domain)) {}
  /// Makes a program that no tensor refers to, for execute().
  Program(std::shared_ptr<Domain> domain, std::vector<Slot> slots, Code code);

  bool run() override;
  void settle() override;
  bool keep_alive(std::unique_ptr<StorageSegment>& segment) override;
  bool can_wait() const override;
  void for_each_segment(c10::function_ref<void(StorageSegment&)> visit) const override;
  Access access_to(const StorageSegment& segment) const override;
  bool writes(const StorageSegment& segment) const override;
  bool runs_in_host() const override { return in_host_; }
  void seal() override { sealed_ = true; }
  void open() override;
  bool advance(bool may_begin) override;
  bool is_sealed() const { return sealed_; }
  /// Opens it as soon as the disk has time, or backward has begun. For a program of whose parameter, with this habit,
  /// a lookup has previewed rows.
  void open_when_idle(const std::shared_ptr<void>& update_habit);
  /// Opens it at the next operator if reading ahead could not hold all that it reads.
  void open_if_large();

  std::size_t length() const override {
    return code_.instructions.size() +
           std::ranges::count_if(slots_, [](const Slot& slot) { return is_zeroed(slot) || slot.is_updated; });
  }
  const Code& code() const { return code_; }
  const std::vector<Slot>& slots() const { return slots_; }
  /// Runs it now, page by page, as far as `progress_` lets it. True if all of it ran.
  bool execute();
  /// Drops all instructions except these, given in order. An early update has done the others, which wrote the slots
  /// `updated`.
  void keep(c10::ArrayRef<std::size_t> indices, c10::ArrayRef<int> updated);
  /// Marks it as running while the result lives.
  [[nodiscard]] Running hold() { return Running(running_); }

  bool empty() const { return length() == 0; }
  /// Whether ranks share all tensors that it writes.
  bool writes_shares() const;
  bool makes_only(const StorageSegment& segment) const;
  void run_into(const at::Tensor& target, const StorageSegment& segment);
  /// Computes what the program will make of some elements of one segment, in the cuts' order (preview.h). The cuts
  /// are in order, disjoint and of whole units. The program stays as it is.
  at::Tensor preview(const StorageSegment& segment, c10::ArrayRef<Cut> cuts);
  /// The elements in a unit; 0 if the tensor is not what the program makes, or parts cannot be computed alone.
  std::size_t unit_of_preview(const at::Tensor& tensor) const;
  bool fits(std::size_t more_slots) const;
  bool begun() const { return progress_.done > 0; }
  bool takes(Chunking chunking, bool any_chunking) const;
  bool takes_all_of(const Program& other) const { return takes(other.code_.chunking, other.code_.any_chunking); }
  void take_over(Program& other);
  int slot_of(const Operand& operand);
  /// Whether two operands can share a slot: a segment viewed as so many elements of one dtype.
  static bool are_alike(const Operand& a, const Operand& b) {
    return a.tensor.dtype() == b.tensor.dtype() && a.tensor.numel() == b.tensor.numel() && a.per == b.per;
  }
  /// Whether another slot has the operand's segment with other elements.
  bool holds_otherwise(const Operand& operand) const;
  int add_temporary(const at::Tensor& tensor);
  void add(Instruction instruction, Chunking chunking, bool any_chunking);

  static constexpr std::size_t kMostSlots = 24, kMostInstructions = 256;

 private:
  static bool is_zeroed(const Slot& slot) { return slot.zero != nullptr; }
  bool is_changed(int slot) const;
  void zero_at_the_end();
  bool is_used(int slot) const;
  void drop_unused_slots();
  bool only_makes_what_is_dead() const;
  bool is_wanted() const;
  void touch(int slot, Access access);
  void drop_copies(c10::ArrayRef<int> slots);
  bool can_run_in_host() const;
  bool updates_states() const;
  void count(const at::Tensor& slice, Where where);
  void choose_where();
  std::vector<Instruction> instructions_in_host() const;
  std::optional<UpdateProgram> find_update(c10::ArrayRef<Instruction> instructions) const;
  void run_update_on(const UpdateProgram& update, c10::ArrayRef<at::Tensor> operands, c10::ArrayRef<int> operand_of);
  void plan_update(c10::ArrayRef<at::Tensor> slices, c10::ArrayRef<Operand> operands);
  void run_piece(c10::ArrayRef<Instruction> instructions, c10::ArrayRef<at::Tensor> operands,
                 c10::ArrayRef<int> operand_of);
  void run_on_registers(c10::ArrayRef<Instruction> instructions, std::vector<at::Tensor>& registers,
                        c10::ArrayRef<int> operand_of);
  /// Forgets all instructions. `failure`: the error that ended the program before it was done.
  void end(std::exception_ptr failure = nullptr);
  bool run_or_end();
  bool can_open() const;
  /// The time of a look at the disk, and the disk's and backward's counts then.
  struct DiskLook {
    Clock::time_point at;
    double busy_seconds;
    std::size_t arrivals;
    int lookups = 1;  // so far
  };
  void open_from_next_operator(std::optional<DiskLook> first_look);
  void open_stream();
  void hurry_stream();
  bool disk_has_time();
  bool is_used_whole() const;
  c10::SmallVector<Operand, 8> operands(bool leaves_gradient, std::vector<int>& operand_of);
  void close_stream() noexcept;

  std::shared_ptr<Domain> domain_;
  std::vector<Slot> slots_;
  Code code_;
  std::size_t elements_ = 0;
  Progress progress_;
  /// The window in which an instruction has written a paged operand, by its first element: it cannot run again.
  std::atomic<std::size_t> written_window_ = SIZE_MAX;
  std::weak_ptr<void> looked_up_;      // the habit of a parameter whose rows a lookup has previewed
  bool will_open_ = false;             // an operator will open it.
  std::optional<DiskLook> last_look_;  // if so: none if it need not wait for the disk to have time.
  bool running_ = false;
  bool sealed_ = false;
  bool settled_ = false;                                // settle() has taken or dropped its early update.
  std::size_t done_slots_ = 0, done_instructions_ = 0;  // those of the early update: other ranks' programs have them
  bool in_host_ = false;                                // it will run in the host, as far as is known.
};

using ProgramPtr = std::shared_ptr<Program>;

}  // namespace zeropage
