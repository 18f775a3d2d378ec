// The pager: the only one who moves bytes between tiers. It gives segments a home, brings pages into frames, writes
// dirty ones back, and chooses what leaves. It knows nothing of tensors or operators.
//
// Contract: a budget is never exceeded; every transfer's result is checked; what throws leaves each page as it was.
// One lock guards all; it is held while waiting for the disk. After close(), and in a forked child, every call that
// would need the bytes throws AccessError.
//
// [Note: one memory] The device here is the CPU: frames and the host's cache of disk pages lie in one arena of
// device_memory + host_memory bytes. A frame that must leave the device's budget moves to the host's by changing who
// pays for it, while it is written behind; no byte is copied. Host and device homes are frames that never leave.
//
// [Note: two memories] A device with memory of its own has two pagers, one above the other. The upper one's frames
// lie in device memory; to it, host and disk homes alike are segments of the lower one, read and written through
// tickets as a disk is. The lower one is the pager of a machine whose operators need no frames.
//
// [Note: gathered] Tensors that are split over ranks have a pager of their own, above the one that holds this rank's
// shares. Its frames are a cache of gathered pages with a budget to itself: what is in it, and so which collectives
// run, follows from the sequence of faults and births and from sizes alone. Nothing local, such as how fast a disk is
// or when a tensor dies, may decide there; the frame of one that died therefore stays until its turn comes.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "zeropage/base/process.h"
#include "zeropage/base/units.h"
#include "zeropage/page/page.h"
#include "zeropage/pager/eviction.h"
#include "zeropage/pager/gathers.h"
#include "zeropage/pager/uploads.h"

namespace zeropage {

struct PagerOptions {
  std::size_t device_bytes = 0;
  std::size_t host_bytes = 0;
  std::string disk_path;  // empty: no disk tier
  std::size_t page_bytes = 4 * kMiB;
  IoEngine io = IoEngine::automatic;
  std::shared_ptr<DeviceMemory> device = nullptr;  // null: operators run on the CPU
  /// Called for each slab of host memory when it is first used; the handle is kept as long as the slab.
  std::function<std::shared_ptr<void>(std::span<std::byte>)> register_memory = nullptr;
};

struct PagerStats {
  std::size_t faults = 0;                                // operators or rules that met a page with no frame
  std::size_t evictions = 0;                             // frames that left memory
  std::size_t read_bytes = 0;                            // from disk
  std::size_t written_bytes = 0;                         // to disk
  std::size_t uploaded_bytes = 0, downloaded_bytes = 0;  // to and from a device with memory of its own
  double waited_seconds = 0;                             // for the disk
  std::size_t home_bytes[kRoles][kTiers] = {};
  std::size_t home_peak[kRoles][kTiers] = {};
};

struct PinRequest {
  Segment* segment;
  Access access;
};

/// One page held in memory for a rule. Its read may still be under way: wait() before touching data().
class PagePin {
 public:
  PagePin() = default;
  PagePin(PagePin&& other) noexcept { *this = std::move(other); }
  PagePin& operator=(PagePin&& other) noexcept {
    std::swap(pager_, other.pager_);
    std::swap(page_, other.page_);
    std::swap(frame_, other.frame_);
    std::swap(data_, other.data_);
    std::swap(write_, other.write_);
    std::swap(passes_, other.passes_);
    return *this;
  }
  ~PagePin();

  /// Returns when the bytes are there. Throws DiskError if they could not be read.
  void wait();
  /// The segment's bytes of this page: on the device, if it has memory of its own.
  std::byte* data() const { return data_; }
  /// Nobody will want the page soon: where memory is short it is written home as soon as it is let go, and leaves
  /// first.
  void pass() { passes_ = true; }
  /// Copies into the page from memory of the same kind.
  void fill(const std::byte* from, std::size_t bytes, std::size_t offset = 0);
  explicit operator bool() const { return frame_ != nullptr; }

 private:
  friend class Pager;
  Pager* pager_ = nullptr;
  Page* page_ = nullptr;
  Frame* frame_ = nullptr;
  std::byte* data_ = nullptr;
  bool write_ = false;
  bool passes_ = false;
};

class Pager : public std::enable_shared_from_this<Pager> {
 public:
  /// `io` replaces the engine that options name: for tests. Throws SettingError, BudgetError, DiskError.
  static std::shared_ptr<Pager> make(const PagerOptions& options, std::unique_ptr<Io> io = nullptr);
  /// The pager of gathered tensors whose shares `local` holds. `device` is null where operators run on the CPU, else
  /// memory of `bytes`.
  static std::shared_ptr<Pager> make_gathered(std::shared_ptr<Pager> local, std::shared_ptr<Ranks> ranks,
                                              std::size_t bytes, std::shared_ptr<DeviceMemory> device);
  ~Pager();

  /// Throws AccessError in a forked child, and after close().
  void check_usable() const;
  /// Gives `segment` a home of spec.bytes, which reads as zeros. Throws BudgetError or DiskError if its tier is full.
  void bind(Segment& segment, const SegmentSpec& spec);
  /// True if a home of `bytes` can be had in `tier` without moving anything out.
  bool has_room(Tier tier, std::size_t bytes) const;
  /// The same for a gathered tensor. It reads as its shares do.
  void bind_gathered(Segment& segment, const GatheredSpec& spec);
  void release(Segment& segment) noexcept;

  /// Of a gathered segment: what operators wrote to it whole goes into this rank's share, and frames that may not be
  /// the same on all ranks are given up. Pinned ones stay. Throws BudgetError, DiskError.
  void store(Segment& segment);
  /// This rank's share is about to be written: no frame may hold what was. Throws AccessError if one is pinned.
  void share_changes(Segment& segment);

  /// Brings all segments in, whole, and exposes them: all, or none and an exception. A segment may be named twice.
  void pin(std::span<const PinRequest> requests);
  void unpin(std::span<const PinRequest> requests) noexcept;

  /// One page, for a rule.
  [[nodiscard]] PagePin pin_page(Segment& segment, std::size_t page, Access access);
  /// Starts reading a page that will soon be pinned, if memory is at hand without waiting for a write. False if not.
  bool prefetch_page(Segment& segment, std::size_t page);
  /// The same for a segment that will soon be pinned whole.
  bool prefetch(Segment& segment);

  /// Makes the segment read as zeros, without touching memory or disk where it has pages of its own.
  void zero(Segment& segment);
  /// Writes the segment's pages home and gives up its frames. Pinned segments stay.
  void evict(Segment& segment);
  /// Whether any page of the segment is in memory.
  bool resident(const Segment& segment) const;
  /// The largest number of bytes that operators can have pinned at once.
  std::size_t frame_limit() const { return budget(Pool::device).limit(); }

  void wait();   // until no transfer is under way; throws DiskError for a write that failed
  void close();  // gives everything back; segments become husks

  PagerStats stats() const;
  const Budget& budget(Pool pool) const { return pool == Pool::device ? device_ : below_ ? below_->host_ : host_; }
  bool is_gathered() const { return gathers_ != nullptr; }
  bool has_separate_memory() const { return memory_ != nullptr; }
  std::size_t page_bytes() const { return page_bytes_; }
  std::string_view io_name() const { return below_ ? below_->io_name() : io_ ? io_->name() : "none"; }
  std::size_t swap_bytes() const { return below_ ? below_->swap_bytes() : swap_ ? swap_->size() : 0; }

 private:
  friend class PagePin;
  struct Gathering;
  explicit Pager(const PagerOptions& options, std::unique_ptr<Io> io);
  Pager(std::shared_ptr<Pager> local, std::shared_ptr<Ranks> ranks, std::size_t bytes,
        std::shared_ptr<DeviceMemory> device);
  void open_below(const PagerOptions& options, std::unique_ptr<Io> io);

  Budget& paying(Pool pool) { return pool == Pool::device ? device_ : host_; }

  // homes.cpp: birth and death
  Run& run_for(const SegmentSpec& spec, std::size_t& offset);
  Run& new_run(const SegmentSpec& spec, std::size_t bytes, std::size_t page_bytes);
  void delete_run(Run& run);
  // gathered.cpp
  Run& gathered_run_for(const GatheredSpec& spec, std::size_t& offset);
  Run& new_gathered_run(const GatheredSpec& spec, std::size_t bytes, std::size_t page_bytes);
  void count_home(const Run& run, bool born);

  // frames.cpp: memory
  Frame* make_frame(Run& run, std::size_t first_page, std::size_t pages, Pool pool, bool permanent = false);
  Frame* place_frame(Run& run, std::size_t first_page, std::size_t pages, Pool pool, Reservation charge, Block memory,
                     bool permanent = false);
  void drop_frame(Frame& frame);
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);
  void clear(std::byte* at, std::size_t bytes);
  void mark_ready(Frame& frame);
  void order_after(Frame& frame);
  void mark_used(Frame& frame);
  Reservation reserve(Pool pool, std::size_t bytes);
  bool make_room(Pool pool);
  Block allocate(std::size_t bytes, FreeList::Side side);
  bool evict_window(std::size_t bytes, bool clean_only = false);
  static bool leaves_at_once(const Frame& frame);
  void evict_frame(Frame& frame);
  void move_to_pool(Frame& frame, Reservation charge, Pool pool);
  bool is_short(const Budget& budget) const { return budget.used() > budget.limit() / 2; }
  void clean(Frame& frame);
  void clean_coldest();

  // page_pins.cpp
  void read_into(Frame& frame);
  bool prefetch_page(Run& run, std::size_t index);
  bool read_into_spare_memory(Run& run, std::size_t first_page, std::size_t pages);

  // transfers.cpp: bytes
  Ticket start_read(Run& run, std::size_t page, std::byte* into);
  void start_write(Run& run, std::size_t page);
  void settle(Run& run, std::size_t page);
  void settle_reads(Frame& frame);
  static void abandon_reads(Frame& frame) noexcept;
  void settle_all(Run& run, std::size_t first, std::size_t end);
  void settle_for_death(Run& run) noexcept;
  void wait_for(Ticket& ticket);

  // gather.cpp: pins
  void gather(std::span<const PinRequest> requests, bool from_empty);
  static bool has_pinned_part(const PinRequest& request);
  void mark(Run& run, std::size_t page, Access access);
  static Residency newborn_state(const Run& run);
  void drop_pin(Frame& frame) noexcept;
  std::byte* address(const Run& run, std::size_t page) const;

  mutable std::mutex mutex_;
  std::condition_variable unpinned_;
  const std::uint64_t generation_;
  bool closed_ = false;
  std::size_t page_bytes_;
  Budget device_, host_;
  std::unique_ptr<Io> io_;
  std::unique_ptr<SwapFile> swap_;
  std::shared_ptr<DeviceMemory> memory_;  // null: the CPU's
  std::shared_ptr<Pager> below_;          // of the host, if memory_ is the device's
  std::unique_ptr<Uploads> uploads_;
  std::shared_ptr<Pager> local_;  // of this rank's shares, if this is the pager of gathered tensors
  std::unique_ptr<Gathers> gathers_;
  std::map<Role, Run*> open_;                      // the gathered run that takes the next small tensor
  std::vector<std::shared_ptr<void>> registered_;  // slabs of the arena
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::map<Run*, std::unique_ptr<Run>> runs_;
  std::map<std::byte*, std::unique_ptr<Frame>> frames_;  // by address
  PagerStats stats_;
};

}  // namespace zeropage
