// A space (as in address space) owns the tiers, the budgets and the pages of the tensors created in it.
//
//   auto space = zeropage::Space::make({.parameters = "disk", .disk_path = "swap", .device_memory = "256MB"});
//   {
//     auto scope = space->enter();          // tensors created on this thread are paged
//     model = std::make_shared<GPT>();
//   }
//
// A space lives as long as its owner or any of its tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zeropage/plan/machine.h"
#include "zeropage/rules/mixed.h"
#include "zeropage/rules/speculation.h"
#include "zeropage/space/config.h"
#include "zeropage/tensor/paged_tensor.h"
#include "zeropage/train/activations.h"
#include "zeropage/train/gradients.h"

namespace zeropage {

/// The contents and the traffic of a space, as plain data. Sizes are in bytes, times in seconds.
struct Report {
  struct Home {
    std::string role, tier;
    std::size_t now, peak;
  };
  struct Memory {
    std::string name;
    std::size_t now, peak, limit;
  };
  std::vector<Home> homes;      // every role and tier that ever held bytes.
  std::vector<Memory> budgets;  // device_memory, host_memory.
  std::size_t faults, evictions, read_bytes, written_bytes, uploaded_bytes, downloaded_bytes, swap_bytes;
  std::size_t file_bytes;  // at home in files that zeropage only reads
  double waited_total;
  // Threads waited for reads from disk, for uploads, for other ranks, and for evictions that free memory.
  double waited_for_disk, waited_for_upload, waited_for_gather, waited_for_memory;
  int ranks;                                   // that share tensors; 1: one process.
  std::size_t gathered_bytes, reduced_bytes;   // this rank sent them for all-gathers and gradient sums.
  std::size_t broadcast_bytes, control_bytes;  // this rank sent them at the start, and for checks and norms.
  std::size_t nonfinite_grads;                 // values in gradients that fused updates read.
  // Elements of parameters that optimizers updated, if the device has memory of its own.
  std::size_t updated_in_host, updated_on_device;
  std::size_t early_updates, updates_committed;  // parameter updates during backward, and those the step used.
  std::size_t wasted_bytes;                      // written by the other early updates.
  std::size_t collectives;                       // that moved data.
  std::string io;
  std::vector<std::pair<std::string, std::size_t>>
      unpaged_operators;  // operators that a rule could have run, with counts
};

/// The ranks that share a space's tensors. Any c10d groups serve, so that zeropage combines with other parallelism.
/// With a replica group, tensors are partitioned inside the shard group and replicated across the replica group, like
/// HSDP and MiCS. Rank i of each shard group must be in one replica group with the other ranks i.
struct Groups {
  c10::intrusive_ptr<c10d::ProcessGroup> shard;    // null: one process
  c10::intrusive_ptr<c10d::ProcessGroup> replica;  // null: no replicas
  bool keep = true;                                // the space keeps them alive: [Note: whose group]
};

class Space : public std::enable_shared_from_this<Space> {
 public:
  /// Throws ConfigError for settings that are malformed or contradict each other, DiskError for an unusable
  /// disk_path. All ranks call it together. Automatic sizes become the least that suits any rank. If one rank fails
  /// or has other settings, all throw (RankError on the others).
  static std::shared_ptr<Space> make(const Config& config, const Groups& groups = {});
  /// Makes a space on a planned machine (plan/machine.h). Its tensors are on torch's "meta" device. Only the thread
  /// that has entered the machine's clock may use it. `ranks`: this is the first of as many, and the others behave
  /// alike.
  static std::shared_ptr<Space> make_planned(const Config& config, const std::shared_ptr<Machine>& machine,
                                             int ranks = 1);

  /// Makes factories on this thread return paged parameters while the scope lives.
  [[nodiscard]] InitScope enter() { return InitScope(domain_); }

  /// Pages an existing tensor and its gradient. It happens in place if nothing else shares the storage; else the
  /// tensor gets a storage of its own, like in Module::to. Moves a tensor on another device to the space's. False if
  /// it is too small or of a kind that cannot be paged.
  bool page(at::Tensor& tensor, Role role = Role::parameter);
  /// Gives an initialised parameter that is paged here a master in master_dtype; operators see it in compute_dtype
  /// from now on. Optimizers, and all else that writes the whole parameter, use the master. False if there is nothing
  /// to do.
  bool mix(at::Tensor& parameter);
  /// Keeps the tensor whole on every rank from now on, whatever the stage. For buffers, which each rank may write
  /// from its own data.
  void keep_whole(at::Tensor& tensor);
  /// Operators that a rule could have run and that took the general path, with counts.
  std::vector<std::pair<std::string, std::size_t>> unpaged_operators() const {
    return domain_->unpaged_operators.counts();
  }
  /// Makes tensors paged outside a scope the same on all ranks. Throws RankError.
  void start_equal() { zeropage::start_equal(*domain_); }

  /// Runs pending updates and waits for writes to the disk. Throws DiskError for a read or write that failed.
  void synchronize();
  /// Frees memory and disk. Tensors of the space then throw AccessError when used.
  void close();

  /// Hooks that page the activations autograd saves, or null if activations do not page.
  std::shared_ptr<Activations> activations() const;

  Report report() const;

  /// Tells when the space and all its tensors are gone; does not keep them.
  class Lifetime {
   public:
    explicit Lifetime(std::weak_ptr<Domain> domain) : domain_(std::move(domain)) {}
    bool is_over() const { return domain_.expired(); }

   private:
    std::weak_ptr<Domain> domain_;
  };
  [[nodiscard]] Lifetime lifetime() const { return Lifetime(domain_); }
  /// Whether the tensor is paged here.
  bool holds(const at::Tensor& tensor) const;
  const Config& config() const { return config_; }  // resolved: only tiers may still be "auto"

 private:
  struct Here;  // the values that settings leave to the machine
  static std::shared_ptr<Space> make_on(const std::shared_ptr<Machine>& planned, const Config& config,
                                        const Groups& groups);
  static std::shared_ptr<Space> make_here(const Config& config, const Groups& groups, const Here& here);
  Space(Config config, std::shared_ptr<Domain> domain) : config_(std::move(config)), domain_(std::move(domain)) {}
  Config config_;
  std::shared_ptr<Domain> domain_;
};

bool is_paged(const at::Tensor& tensor);

/// How zeropage stores a paged tensor, for people to read.
struct Kept {
  std::string role, tier;       // of the home; for a partitioned tensor, of its share.
  bool is_partitioned;          // over ranks.
  std::string visible, master;  // dtypes; master is empty without mixed precision.
  std::uint64_t run;            // the name of its run in traces; small tensors may share one.
};
/// Empty for a tensor that is not paged, or has no home yet.
std::optional<Kept> kept(const at::Tensor& tensor);
/// The number of ranks that share the tensor; 1 for one that is not paged.
int ranks_of(const at::Tensor& tensor);
/// The tensor's number on all ranks; 0 for one that is not paged, or not over ranks.
std::uint64_t number_of(const at::Tensor& tensor);
/// Evicts the tensor from memory now. Does nothing for one that is not paged.
void evict(const at::Tensor& tensor);

/// The first element's address in the one address space of all paged tensors (see StorageSegment). It shows which
/// tensors share elements; no code may read from it. 0 for a tensor that is not paged.
std::uint64_t virtual_address(const at::Tensor& tensor);

/// An ordinary tensor with the same content and layout and no history, for code that needs raw memory of its own.
at::Tensor plain_copy(const at::Tensor& tensor);

/// Ranks call these after the program has set a parameter's `.data`, or its gradient, on all of them. The parameter
/// is paged again, with the same content on all ranks; the gradient becomes the mean over ranks.
void take_data(at::Tensor parameter);
void take_gradient(const at::Tensor& parameter);
/// Prepares an optimizer's step over these parameters, or clipping. Pages parameters again whose `.data` the program
/// has set to an ordinary tensor. Averages gradients that are each rank's own, for example those that the program has
/// set: all ranks call it together. True if ranks share any of the parameters.
bool before_step(c10::ArrayRef<at::Tensor> parameters);
/// Ends an optimizer's step over these parameters. If async_step is off, runs its pending updates now.
void step_ended(c10::ArrayRef<at::Tensor> parameters);

/// Holds tensors whole, for reading, while it lives. All ranks call it together before some of them use some of the
/// tensors. It ignores tensors that every rank has whole.
TensorPin hold(c10::ArrayRef<at::Tensor> tensors);
/// Sums the gradients that came so far over ranks, with zeros for those that this rank lacks. All ranks call it
/// together.
void settle_gradients(const at::Tensor& parameter);

/// Holds a tensor's data in memory while it lives. Code may then read data_ptr() and, unless access is `read`, write
/// it. In mixed precision the master follows the writes. An ordinary tensor is always in memory.
class RawPin {
 public:
  RawPin() = default;
  /// Throws AccessError or BudgetError.
  RawPin(const at::Tensor& tensor, Access access);
  RawPin(RawPin&&) = default;
  RawPin& operator=(RawPin&& other) noexcept {
    std::swap(pin_, other.pin_);
    std::swap(written_, other.written_);
    return *this;
  }
  /// Calls release() and ignores its errors.
  ~RawPin();
  /// Unpins. Throws if it cannot update the master, or, over ranks, store the share.
  void release();
  /// Unpins after a write that failed: neither the master nor, over ranks, the share takes it.
  void drop();

 private:
  TensorPin pin_;
  std::optional<WrittenMasters> written_;
};
RawPin pin(const at::Tensor& tensor, Access access = Access::write);

/// Holds the paged tensors among `tensors` whole, together, while it lives, for code that reads several addresses,
/// such as a compiled region. `writes` marks those that the code writes. Gradients of leaves among them become paged.
/// Throws BudgetError if they do not fit together, AccessError for tensors that such code may not read or write.
class RegionPin {
 public:
  RegionPin(c10::ArrayRef<at::Tensor> tensors, const std::vector<bool>& writes);
  /// Unpins after code that succeeded.
  void release();
  /// Unpins after code that failed.
  void drop();

 private:
  std::vector<LeafHold> leaves_;
  TensorPin pin_;
};

/// Pages `tensor` in the space of `other`, with a master if `other` has one. False if `other` is not paged, or
/// `tensor` cannot be.
bool page_like(at::Tensor& tensor, const at::Tensor& other);
/// The tensor that a module's state_dict() returns for this one: itself or its master, by the setting state_dict.
at::Tensor saved(const at::Tensor& tensor);
/// The dtype of a parameter's master and optimizer states.
c10::ScalarType dtype_of_states(const at::Tensor& parameter);
/// Whether both are paged, in one space.
bool in_one_space(const at::Tensor& tensor, const at::Tensor& other);
/// Whether it is an optimizer state stored in fewer bits than operators see (optimizer_dtype).
bool is_quantised(const at::Tensor& tensor);

}  // namespace zeropage
