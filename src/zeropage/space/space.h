// A space (as in address space) owns the tiers, the budgets and the pages of the tensors created in it.
//
//   auto space = zeropage::Space::make({.states = "disk", .disk_path = "/var/tmp", .device_memory = "256MB"});
//   {
//     auto scope = space->enter();  // factories on this thread make paged tensors
//     model = GPT(options);
//   }
//
// It is no allocator and no trainer: paged tensors are ordinary tensors, and modules, autograd and optimizers are
// torch's own. A space lives as long as its owner or any of its tensors. Any thread may use it and its tensors.
//
// Over ranks, all ranks call the functions of a space together and use its tensors in the same order. Ranks that do
// not throw RankError.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/clock.h"
#include "zeropage/page/kinds.h"
#include "zeropage/space/config.h"
#include "zeropage/tensor/init_scope.h"

namespace c10d {
class ProcessGroup;
}

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn

namespace zeropage {

class Activations;
struct Domain;
class Outer;
class Machine;

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
  // The time of the program's threads inside zeropage, by cause (Spent in base/booked_time.h). All other time is the
  // program's own: operator_seconds().
  double waited_total;
  double waited_for_disk, waited_for_upload, waited_for_gather, waited_for_memory;
  double waited_for_device, waited_for_ranks, waited_for_threads, waited_for_checkpoint;
  double update_seconds, copy_seconds, overhead_seconds;
  int ranks;                                   // that share tensors; 1: one process.
  int peers;                                   // of them, those whose memory this one reads.
  std::size_t gathered_bytes, reduced_bytes;   // this rank sent them for all-gathers and gradient sums.
  std::size_t sent_inside_nodes;               // of these, in exchanges of one node's ranks alone.
  std::size_t broadcast_bytes, control_bytes;  // this rank sent them at the start, and for checks and norms.
  std::size_t nonfinite_grads;                 // values in gradients that fused updates read.
  // Elements of parameters that optimizers updated, if the device has memory of its own.
  std::size_t updated_in_host, updated_on_device;
  std::size_t early_updates, updates_committed;  // parameter updates during backward, and those the step used.
  std::size_t previews;                          // embedding lookups that computed rows of a deferred update.
  std::size_t wasted_bytes;                      // written by the other early updates.
  std::size_t collectives;                       // that moved data.
  std::size_t read_by_peers;                     // bytes of those sent: ranks of this host read them from memory.
  double network_seconds;                        // that gathers and sums took, at the rate measured; 0: unknown.
  double waited_for_network;                     // of them, those in which a thread waited.
  std::string io;
  std::vector<std::pair<std::string, std::size_t>>
      unpaged_operators;           // operators that a rule could have run, with counts
  double seconds = 0;              // since the space was made.
  std::size_t disk_endurance = 0;  // the setting: bytes that may be written over the drive's life; 0: unknown.
};

/// The share of the network's seconds under computation, 0 to 1; none if no rate was measured.
std::optional<double> hidden_network(const Report& report);

/// Seconds in which the program's threads ran operators, or code of the program: all that no cause explains.
double operator_seconds(const Report& report);

/// The cause of most time other than operators: "disk", "upload", "gather", "memory", "device", "ranks", "threads",
/// "checkpoint", "updates", "copies" or "overhead". "compute" if none reaches 5 %.
struct Bound {
  std::string cause;
  double share;  // of the time. Several threads that wait at once count each.
  std::string advice;
};
Bound bound_by(const Report& report);

/// Tables for people to read, with the cause of most time and advice. Python prints the same.
std::string to_string(const Report& report);
std::ostream& operator<<(std::ostream& out, const Report& report);

/// The ranks that share a space's tensors. Any c10d groups serve, so that zeropage combines with other parallelism.
/// To fill one in, a program includes torch's ProcessGroup.hpp. With a replica group, tensors are partitioned inside
/// the shard group and replicated across the replica group, like HSDP and MiCS. Rank i of each shard group must be in
/// one replica group with the other ranks i.
struct Groups {
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  Group shard;       // null: one process
  Group replica;     // null: no replicas
  Group node;        // of the shard group, the ranks of this one's node; null: the shard group sends to single ranks
  bool keep = true;  // the space keeps them alive: [Note: whose group]
};

/// The language of the program. Some settings need hooks that only Python has: `activations` in host or on disk,
/// `optimizer_dtype` in fewer bits, `async_step` = "false" and `early_update` = "always".
enum class Frontend : std::uint8_t { cpp, python };

class Space : public std::enable_shared_from_this<Space> {
 public:
  /// Makes a space of one process. Creates its swap file, if a role may be on disk, and takes its budgets.
  /// Throws ConfigError for settings that are malformed, contradict each other, or have no effect in the frontend's
  /// language. Throws DiskError for an unusable disk_path.
  static std::shared_ptr<Space> make(const Config& config, Frontend frontend = Frontend::cpp);
  /// Makes a space over ranks. All ranks call it together. Automatic sizes become the least that suits any rank. If
  /// one rank fails or has other settings, all throw: RankError on the others.
  static std::shared_ptr<Space> make(const Config& config, const Groups& groups, Frontend frontend = Frontend::cpp);
  /// Gives gathers, sums of gradients, and the words that ranks compare before gathers groups of their own over the
  /// shard group's ranks ([Note: groups of their own] in comm/collectives.h). All ranks call it together, before they
  /// share tensors.
  void set_groups(const Groups::Group& gathers, const Groups::Group& sums, const Groups::Group& checks);
  /// Makes a space on a planned machine (plan/machine.h). Its tensors are on torch's "meta" device. Only the thread
  /// that has entered the machine's clock may use it. `ranks`: this is the first of as many, and the others behave
  /// alike. Takes the settings of Python.
  static std::shared_ptr<Space> make_planned(const Config& config, const std::shared_ptr<Machine>& machine,
                                             int ranks = 1);

  /// Makes factories on this thread return paged parameters while the scope lives (tensor/init_scope.h). Any thread
  /// may enter, also several at once. Over ranks, threads take turns: ranks count tensors in the order of creation.
  /// Throws RankError.
  [[nodiscard]] InitScope enter() { return InitScope(domain_); }

  /// Pages an existing tensor and its gradient. It happens in place if nothing else shares the storage; else the
  /// tensor gets a storage of its own, like in Module::to. Moves a tensor on another device to the space's. False if
  /// it is too small or of a kind that cannot be paged. Over ranks, call start_equal() after the last one; each rank
  /// keeps its own content of a partitioned tensor's share. Throws BudgetError, DiskError, AccessError, RankError.
  bool page(at::Tensor& tensor, Role role = Role::parameter);
  /// Pages all parameters, buffers and gradients of a module, in place, and calls mix() for its parameters. The
  /// module may be built inside or outside a scope. Over ranks, all ranks call it together, with equal content.
  void page(torch::nn::Module& module);
  /// The same for a holder, such as torch::nn::Sequential.
  template <class Contained>
  void page(const torch::nn::ModuleHolder<Contained>& module) {
    page(*module.ptr());
  }
  /// Pages the tensor that a parameter of a subclass, such as DTensor, keeps inside. Its gradients then go through
  /// inner_gradient() (train/gradients.h). False if it cannot be paged. Otherwise as page().
  bool page_inner(at::Tensor& tensor, std::shared_ptr<const Outer> outer);
  /// Gives an initialised parameter that is paged here a master in master_dtype; operators see it in compute_dtype
  /// from now on. Optimizers, and all else that writes the whole parameter, use the master. False if there is nothing
  /// to do. In C++, the end of a scope does this for floating-point parameters made in it that require gradients.
  /// Call it for other ones: frozen parameters, and tensors that page() paged. Throws BudgetError, DiskError.
  bool mix(at::Tensor& parameter);
  /// Keeps the tensor whole on every rank from now on, whatever the stage. For buffers, which each rank may write
  /// from its own data.
  void keep_whole(at::Tensor& tensor);
  /// Operators that a rule could have run and that took the general path, with counts.
  std::vector<std::pair<std::string, std::size_t>> unpaged_operators() const;
  /// Makes tensors paged outside a scope the same on all ranks: rank 0's, except that each rank keeps its own content
  /// of its share of a partitioned tensor. Throws RankError.
  void start_equal();

  /// Runs pending updates and waits for writes to the disk. After optimizer.step(), it makes the step complete; a
  /// program needs it only to time the step or to meet its errors there. Throws DiskError for a read or write that
  /// failed, BudgetError and RankError for updates.
  void synchronize();
  /// Frees memory and disk. Tensors of the space then throw AccessError when used. No operator may be using them.
  void close();

  /// Hooks that page the activations autograd saves (train/activations.h), or null if activations do not page.
  std::shared_ptr<Activations> activations() const;

  /// The content and traffic so far. Waits for nothing.
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
                                        const Groups& groups, Frontend frontend);
  static std::shared_ptr<Space> make_here(const Config& config, const Groups& groups, const Here& here);
  Space(Config config, std::shared_ptr<Domain> domain) : config_(std::move(config)), domain_(std::move(domain)) {}
  Config config_;
  std::shared_ptr<Domain> domain_;
  std::shared_ptr<void> tensor_heap_;  // in use until close()
  std::atomic<bool> closed_ = false;
  const Clock::time_point made_ = Clock::now();
  const BookedTime::Seconds spent_before_ = BookedTime::of_no_space().seconds();
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
/// Evicts the tensor from memory now. Does nothing for one that is not paged.
void evict(const at::Tensor& tensor);

/// An ordinary tensor with the same content and layout and no history, for code that needs raw memory of its own.
at::Tensor plain_copy(const at::Tensor& tensor);

/// Holds a tensor's data in memory while it lives. Code may then read data_ptr() and, unless access is `read`, write
/// it. In mixed precision the master follows the writes. An ordinary tensor is always in memory. The pin keeps the
/// tensor's memory alive; only one thread uses a pin.
class RawPin {
 public:
  RawPin() noexcept;
  /// Over ranks, all call it together: it gathers a partitioned tensor. Throws AccessError, BudgetError, DiskError or
  /// RankError.
  RawPin(const at::Tensor& tensor, Access access);
  RawPin(RawPin&&) noexcept;
  /// Exchanges the two pins.
  RawPin& operator=(RawPin&& other) noexcept;
  /// Calls release() and ignores its errors.
  ~RawPin();
  /// Unpins. Throws if it cannot update the master, or, over ranks, store the share.
  void release();
  /// Unpins after a write that failed: neither the master nor, over ranks, the share takes it.
  void drop();

 private:
  struct Held;
  std::unique_ptr<Held> held_;  // null: nothing is pinned
};
/// Pins the tensor, as RawPin's constructor does.
RawPin pin(const at::Tensor& tensor, Access access = Access::write);

}  // namespace zeropage
