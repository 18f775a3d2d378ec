// The data that a simulation's threads share: the cache, the segments, and the books of what threads ask for and
// hold. The baton guards it.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "simulate/model.h"
#include "simulate/scheduler.h"
#include "simulate/simulated_device.h"
#include "simulate/simulated_io.h"
#include "zeropage/base/errors.h"

namespace zeropage::simulate {

/// The kinds of operations, for --skip.
enum class Kind : std::uint8_t {
  whole,
  stream,
  read_others,
  zero,
  evict,
  read_home,
  version,
  write_behind,
  freeze,
  wait,
  bind,
  compute,
  below,
};
inline constexpr const char* kKinds[] = {"whole",     "stream",  "read_others",  "zero",   "evict",
                                         "read_home", "version", "write_behind", "freeze", "wait",
                                         "bind",      "compute", "below"};
inline constexpr std::size_t kKindsCount = std::size(kKinds);

/// Decided by the seed before a run.
struct Setup {
  std::size_t page_bytes = 8 * kKiB;
  int owners = 2;              // program threads
  std::size_t segments = 5;    // of each
  std::size_t most_pages = 4;  // of a segment
  std::size_t cycle = 8;       // operations that a thread repeats
  int cycles = 6;
  std::size_t device_bytes = 0, host_bytes = 0, disk_bytes = 0;
  std::size_t device_homes = 0, host_homes = 0;  // most bytes of each owner
  std::size_t quota = 0;                         // bytes that an operation may pin
  bool is_tight = false;                         // threads may ask for more than there is
  bool closes_early = false;
  bool has_small_disk = false;
  bool has_device = false;         // with memory of its own
  std::uint64_t surprise_in = 12;  // one in so many operations is not the plan's; 0: none
  DiskProfile disk;
  std::array<std::uint64_t, kKindsCount> weights{};  // of the kinds of operations: each seed prefers some
  std::set<Kind> skipped;

  static Setup of(std::uint64_t seed, Random& random);
  bool has_disk_faults() const {
    return disk.refused_in > 0 || disk.failed_in > 0 || disk.short_in > 0 || has_small_disk;
  }
  std::string describe() const;
};

/// Content that a checkpoint is to write.
struct SavedSegment {
  std::shared_ptr<SimulatedSegment> segment;
  std::vector<PageModel> model;
  FrozenSegment frozen;  // destroyed first
};

class World {
 public:
  World(Threads& threads, Result& result, const Setup& setup);

  Threads& threads;
  Result& result;
  const Setup setup;
  SimulatedIo* io = nullptr;                // owned by the cache
  std::shared_ptr<SimulatedDevice> device;  // null: operators run on the CPU
  std::shared_ptr<FrameCache> cache;
  std::vector<std::vector<std::shared_ptr<SimulatedSegment>>> segments;  // by owner
  bool is_closing = false;
  bool faults_over = false;

  // The checkpoint's queue:
  Mutex mutex;
  Condition changed;
  std::deque<SavedSegment> to_save;
  bool no_more = false;

  Stamp next_stamp(const SimulatedSegment& segment, std::size_t page) {
    return ++stamps_ << 24 | static_cast<Stamp>(segment.id()) << 12 | page;
  }
  std::shared_ptr<SimulatedSegment> make_segment(int owner, const SegmentSpec& spec);

  /// Fails unless `at` holds the page of a model. If several contents were possible, the
  /// page has the one that was found from now on.
  void check(const SimulatedSegment& segment, std::size_t page, PageModel& model, const std::byte* at,
             const char* where);
  /// The same for memory of operators: on a device, now or, if the content is certain, later.
  void check_operand(const SimulatedSegment& segment, std::size_t page, PageModel& model, const std::byte* at,
                     const char* where, bool now, bool only_if_quiet = false);
  /// On a device: orders the calling thread's stream after the owner's writes.
  void order_after_writes(const SimulatedSegment& segment) {
    if (device && segment.written) device->stream_wait(segment.written);
  }
  /// An operator that writes a stamp.
  void write_operand(std::byte* at, std::size_t bytes, Stamp stamp);
  /// Whether a reader may compare the segment's content.
  static bool is_quiet(const SimulatedSegment& segment) { return segment.busy == 0; }

  void begin_asking(std::size_t whole_bytes, std::size_t page_bytes);
  void end_asking(std::size_t whole_bytes, std::size_t page_bytes);
  /// Fails unless what was asked for since the operation began exceeded the budget.
  void judge(const BudgetError& error, bool is_whole);
  void judge(const DiskError& error);
  void begin_operation();

  /// A pin was granted, or ends.
  void hold(const SimulatedSegment& segment, std::size_t page, const std::byte* at, std::size_t bytes);
  void let_go(const SimulatedSegment& segment, std::size_t page, const std::byte* at);

  /// After each event.
  void check_budgets();
  void count_home(const SegmentSpec& spec, int change);
  /// The same in bytes that homes may have: from before a segment is bound until after it is released.
  void count_most_homes(const SegmentSpec& spec, bool begins);
  /// At rest: all memory in use is homes.
  void check_rest(const char* when);
  /// After close(): no memory is in use.
  void check_closed();

 private:
  struct Grant {
    const SimulatedSegment* segment;
    std::size_t page;
    const std::byte* at;
    std::size_t bytes;
    bool is_home;
  };
  std::size_t least_home_bytes() const;
  bool is_permanent(const SimulatedSegment& segment) const;
  std::size_t pinned_bytes() const;

  Stamp stamps_ = 0;
  int ids_ = 0;
  struct Asked {
    std::size_t device = 0, host_homes = 0, all = 0;
  };
  void note_asked();
  std::size_t whole_ = 0, pages_ = 0;  // bytes that threads ask for or hold
  std::size_t most_homes_[kTiers] = {};
  std::vector<Asked> most_;  // during each thread's operation
  std::vector<Grant> grants_;
  std::array<std::array<int, kTiers>, kRoles> sharing_{};  // segments that share pages
  std::size_t alone_bytes_[kTiers] = {};                   // permanent homes of their own
};

/// A charge in the books of what threads ask for.
class Asking {
 public:
  Asking(World& world, std::size_t whole, std::size_t pages) : world_(world), whole_(whole), pages_(pages) {
    world_.begin_asking(whole_, pages_);
  }
  ~Asking() { world_.end_asking(whole_, pages_); }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

 private:
  World& world_;
  const std::size_t whole_, pages_;
};

/// Marks a segment whose content is changing.
class Busy {
 public:
  Busy(World& world, std::shared_ptr<SimulatedSegment> segment) : world_(world), segment_(std::move(segment)) {
    ++segment_->busy, ++segment_->writes;
  }
  Busy(Busy&& other) noexcept : world_(other.world_), segment_(std::move(other.segment_)) {}
  Busy& operator=(Busy&&) = delete;
  ~Busy() {
    if (!segment_) return;
    if (world_.device) segment_->written = world_.device->record();
    --segment_->busy;
  }

 private:
  World& world_;
  std::shared_ptr<SimulatedSegment> segment_;
};

}  // namespace zeropage::simulate
