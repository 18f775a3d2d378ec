// A space, as in address space: it owns the tiers, the budgets and the pages of the tensors created in it.
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

/// What a space holds and has moved; sizes in bytes. Plain data, for programs and for report tables.
struct Report {
  struct Home {
    std::string role, tier;
    std::size_t now, peak;
  };
  struct Memory {
    std::string name;
    std::size_t now, peak, limit;
  };
  std::vector<Home> homes;      // of every role and tier that ever held something
  std::vector<Memory> budgets;  // device_memory, host_memory
  std::size_t faults, evictions, read_bytes, written_bytes, uploaded_bytes, downloaded_bytes, swap_bytes;
  std::size_t file_bytes;  // at home in files that are only read
  double waited_total;
  // By threads: for content from disk, to the device, and from other ranks; and for memory, until something had left.
  double waited_for_disk, waited_for_upload, waited_for_gather, waited_for_memory;
  int ranks;                                   // over which tensors lie; 1: one process
  std::size_t gathered_bytes, reduced_bytes;   // sent by this rank: all-gathers; sums of gradients
  std::size_t broadcast_bytes, control_bytes;  // at the start; checks and norms
  std::size_t nonfinite_grads;                 // values in gradients that fused updates have met
  // Elements of parameters, of a device with memory of its own, that optimizers updated here and there.
  std::size_t updated_in_host, updated_on_device;
  std::size_t early_updates, updates_committed;  // of parameters, that ran under backward; and that the step took
  std::size_t wasted_bytes;                      // that the others wrote
  std::size_t collectives;                       // that moved data
  std::string io;
  std::vector<std::pair<std::string, std::size_t>>
      unpaged_operators;  // operators that a rule could have run, with counts
};

/// The ranks over which a space's tensors lie. Any groups of c10d, for use beside other parallelism. With a replica
/// group, tensors are partitioned inside the shard group and replicated across the replica group, as HSDP and MiCS
/// do: rank i of each shard group must be in one replica group with the other ranks i.
struct Groups {
  c10::intrusive_ptr<c10d::ProcessGroup> shard;    // null: one process
  c10::intrusive_ptr<c10d::ProcessGroup> replica;  // null: no replicas
  bool keep = true;                                // the space keeps them alive; see [Note: whose group]
};

class Space : public std::enable_shared_from_this<Space> {
 public:
  /// Throws ConfigError for settings that are malformed or contradict each other, DiskError for an unusable
  /// disk_path. Over ranks, all of them make it together: sizes left to the machine are the least that suits any
  /// rank, and all throw if one cannot make it (RankError on the others) or has other settings.
  static std::shared_ptr<Space> make(const Config& config, const Groups& groups = {});
  /// A space on a machine that is not there (plan/machine.h). Its tensors are on torch's "meta" device, and it is for
  /// the thread that has entered the machine's clock. `ranks`: of as many it is the first, and the others do as it
  /// does.
  static std::shared_ptr<Space> make_planned(const Config& config, const std::shared_ptr<Machine>& machine,
                                             int ranks = 1);

  /// While the scope lives, factories on this thread make paged parameters.
  [[nodiscard]] InitScope enter() { return InitScope(domain_); }

  /// Makes an existing tensor paged: in place if nothing else shares its storage, else, like Module::to, by giving it
  /// a storage of its own. One on another device moves to the space's. Gradients it has follow. False if it is too
  /// small or not one that can be paged.
  bool page(at::Tensor& tensor, Role role = Role::parameter);
  /// Where compute_dtype says so, operators see the parameter in that dtype from now on, and its master keeps it in
  /// master_dtype, for optimizers and all else that writes it whole. Of a parameter that is paged here, once it is
  /// initialised. False if there is nothing to do.
  bool mix(at::Tensor& parameter);
  /// With ranks: the tensor is whole on every rank from now on, whatever the stage. For buffers, which each rank may
  /// write as its own data says.
  void keep_whole(at::Tensor& tensor);
  /// Operators that a rule could have run and that took the general path, with counts.
  std::vector<std::pair<std::string, std::size_t>> unpaged_operators() const {
    return domain_->unpaged_operators.counts();
  }
  /// With ranks: what was paged outside a scope becomes the same on all of them. Throws RankError.
  void start_equal() { zeropage::start_equal(*domain_); }

  /// Runs what optimizers have left to do and waits until nothing is under way to the disk. Throws DiskError for a
  /// read or write that failed.
  void synchronize();
  /// Gives memory and disk back. Tensors of the space then throw AccessError when used.
  void close();

  /// What autograd is to save through, if activations page; else null.
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
  const Config& config() const { return config_; }  // as resolved: no "auto" left but for tiers

 private:
  struct Here;  // what the settings leave to the machine
  static std::shared_ptr<Space> make_on(const std::shared_ptr<Machine>& planned, const Config& config,
                                        const Groups& groups);
  static std::shared_ptr<Space> make_here(const Config& config, const Groups& groups, const Here& here);
  Space(Config config, std::shared_ptr<Domain> domain) : config_(std::move(config)), domain_(std::move(domain)) {}
  Config config_;
  std::shared_ptr<Domain> domain_;
};

bool is_paged(const at::Tensor& tensor);

/// How a paged tensor is kept, for people.
struct Kept {
  std::string role, tier;       // the home's; of a partitioned tensor, its share's
  bool is_partitioned;          // over ranks
  std::string visible, master;  // dtypes; master is empty without mixed precision
  std::uint64_t run;            // by which traces name what moves; small tensors may share one
};
/// Nothing for one that is not paged, or has no home yet.
std::optional<Kept> kept(const at::Tensor& tensor);
/// Over how many ranks the tensor lies; 1 for one that is not paged.
int ranks_of(const at::Tensor& tensor);
/// What the tensor is called on all of them; 0 for one that is not paged, or not over ranks.
std::uint64_t number_of(const at::Tensor& tensor);
/// Pages out now what the tensor has in memory. Nothing for one that is not paged.
void evict(const at::Tensor& tensor);

/// The first element's address in the one address space of all paged tensors (see StorageSegment): says which tensors
/// share elements, and is never to be read. 0 for one that is not paged.
std::uint64_t virtual_address(const at::Tensor& tensor);

/// An ordinary tensor with the same content, layout and history-free, for code that must have raw memory of its own.
at::Tensor plain_copy(const at::Tensor& tensor);

/// Over ranks, after the program has set a parameter's `.data`, or its gradient, on all of them: the parameter is
/// paged again, with the same content on all ranks; the gradient becomes the mean over ranks.
void take_data(at::Tensor parameter);
void take_gradient(const at::Tensor& parameter);
/// Before an optimizer's step over these parameters, and before their gradients are clipped. A parameter whose
/// `.data` the program has set to an ordinary tensor is paged again. Over ranks, gradients that are each rank's own,
/// as those that the program has set, become their mean: all ranks call it together. Whether any parameter lies over
/// ranks.
bool before_step(c10::ArrayRef<at::Tensor> parameters);
/// An optimizer's step over these parameters is over. Where async_step is off, what it left to do is done now.
void step_ended(c10::ArrayRef<at::Tensor> parameters);

/// Holds tensors whole, for reading, while it lives: what all ranks do together before some of them use some of the
/// tensors. Those that every rank has whole are left alone.
TensorPin hold(c10::ArrayRef<at::Tensor> tensors);
/// With ranks: gradients that came so far are summed, zeros for those that this rank lacks. All ranks do it together.
void settle_gradients(const at::Tensor& parameter);

/// A tensor's data in memory, where data_ptr() may be read and, unless access is `read`, written, while it lives. In
/// mixed precision the master follows what was written. An ordinary tensor is always there.
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
  /// As release(), and forgets its errors.
  ~RawPin();
  /// Lets go. Throws what keeps the master from following, and over ranks the share from being stored.
  void release();
  /// Lets go after a write that failed: neither the master nor, over ranks, the share takes it.
  void drop();

 private:
  TensorPin pin_;
  std::optional<WrittenMasters> written_;
};
RawPin pin(const at::Tensor& tensor, Access access = Access::write);

/// Holds the paged ones among `tensors` whole, together, while it lives, for code that reads addresses of several, as
/// a compiled region does; those that it writes are said by `writes`. Gradients of leaves among them become paged.
/// Throws BudgetError if they do not fit together, AccessError for what such code may not write.
class RegionPin {
 public:
  RegionPin(c10::ArrayRef<at::Tensor> tensors, const std::vector<bool>& writes);
  /// After code that succeeded, and after code that did not.
  void release();
  void drop();

 private:
  std::vector<LeafHold> leaves_;
  TensorPin pin_;
};

/// Pages `tensor` as `other` is paged: in its space, with a master if that has one. False if `other` is not paged, or
/// `tensor` is not one that can be.
bool page_like(at::Tensor& tensor, const at::Tensor& other);
/// What a module's state_dict() gives of a tensor, as the setting of that name says: itself, or its master.
at::Tensor saved(const at::Tensor& tensor);
/// The dtype of what optimizers keep beside a parameter, and of its master.
c10::ScalarType dtype_of_states(const at::Tensor& parameter);
/// Whether both are paged, in one space.
bool in_one_space(const at::Tensor& tensor, const at::Tensor& other);
/// Whether an optimizer keeps it in fewer bits than operators see (optimizer_dtype).
bool is_quantised(const at::Tensor& tensor);

}  // namespace zeropage
