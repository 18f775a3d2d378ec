// A cache of frames: what of the pages of one memory is in it. It gives segments a home, brings pages into frames,
// writes dirty ones back, and chooses by the plan what comes and what leaves. It knows nothing of tensors or
// operators.
//
// Contract: a budget is never exceeded. Every transfer's result is checked. An operation that throws has changed no
// page's content. One lock guards all; it is never held while waiting (monitor.h). After close(), and in a forked
// child, every call that needs the bytes throws AccessError.
//
// It is made of layers. Each has a file of its own, keeps its own data under the one lock, and uses none below it:
//
//   Monitor               the lock, and how threads wait
//   FrameMemory, Budgets  memory, and who may use how much of it
//   Timeline              what the program uses, and how far it has come
//   Frames                pins; what becomes of a frame; which leaves next
//   Runs                  which are alive, and what they take at home
//   Transfers             bytes on their way. One that ended calls go_on
//   Room                  where frames get memory, and what leaves for them
//   ReadAhead             what comes before it is asked for
//   WholePins, PagePins   what operators and rules hold
//   LowerPins             what code on the host holds of a device's pages
//   Contents              zeroing and eviction of whole segments
//   HomeReads             what is read past the cache
//   Versions              what is written ahead of being wanted
//   Snapshots             what a checkpoint has yet to write, while training goes on
//   HomeAllocator         which run a new segment lies in, and where that is at home
//
// [Note: one memory] Where operators run on the CPU, frames and the cache of disk pages lie in one arena of
// device_memory + host_memory bytes. What operators hold at once, and homes of tier device, never exceed
// device_memory; homes of tier host never exceed host_memory; all of them with all cached pages never exceed the sum.
// Host and device homes are frames that never leave.
//
// [Note: two memories] A device with memory of its own has two caches, one above the other. The upper one's frames
// lie in device memory; to it, host and disk homes alike are pages of the lower one (LowerCacheHome).
//
// [Note: gathered] Tensors that are partitioned over ranks have a cache of their own, above the one that holds this
// rank's shares (ShardedHome). What is in it, and so which collectives run, follows from the sequence of pins and of
// creations and from sizes alone. Nothing local, such as how fast a disk is or when a tensor dies, may decide there:
// reads ahead start when an operator pins, never when a transfer ends; the frame of a tensor that died stays until
// its turn; and a parameter that died on this rank is gathered as long as the plan says so, since it may live on
// others.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zeropage/base/units.h"
#include "zeropage/comm/ranks.h"
#include "zeropage/pager/budgets.h"
#include "zeropage/pager/contents.h"
#include "zeropage/pager/frame_memory.h"
#include "zeropage/pager/frames.h"
#include "zeropage/pager/home.h"
#include "zeropage/pager/home_allocator.h"
#include "zeropage/pager/home_reads.h"
#include "zeropage/pager/lower_pins.h"
#include "zeropage/pager/monitor.h"
#include "zeropage/pager/page_pins.h"
#include "zeropage/pager/read_ahead.h"
#include "zeropage/pager/room.h"
#include "zeropage/pager/runs.h"
#include "zeropage/pager/snapshots.h"
#include "zeropage/pager/timeline.h"
#include "zeropage/pager/transfers.h"
#include "zeropage/pager/upper_cache.h"
#include "zeropage/pager/versions.h"
#include "zeropage/pager/whole_pins.h"
#include "zeropage/store/mapped_files.h"

namespace zeropage {

struct CacheOptions {
  std::size_t device_bytes = 0;
  std::size_t host_bytes = 0;
  std::string disk_path;  // one or several, as split_disk_path takes it; empty: no disk tier
  std::size_t page_bytes = 4 * kMiB;
  IoOptions io = {};
  std::shared_ptr<DeviceMemory> device = nullptr;  // null: operators run on the CPU
  /// Called for each slab of host memory when it is first used; the handle is kept as long as the slab.
  std::function<std::shared_ptr<void>(std::span<std::byte>)> register_memory = nullptr;
  std::optional<Hollow> hollow = std::nullopt;  // with an engine that moves what lies nowhere, in its own time
};

struct CacheStats {
  std::size_t faults = 0;                                // operators or rules that met a page with no frame
  std::size_t evictions = 0;                             // frames that left memory
  std::size_t read_bytes = 0;                            // from disk
  std::size_t written_bytes = 0;                         // to disk
  std::size_t uploaded_bytes = 0, downloaded_bytes = 0;  // to and from a device with memory of its own
  double waited_seconds = 0;                             // by threads, for transfers
  double waited_for_disk = 0, waited_for_upload = 0, waited_for_gather = 0, waited_for_memory = 0;  // of all caches
  std::size_t surprises = 0;     // uses that were not planned
  std::size_t source_bytes = 0;  // at home in files that are only read
  std::size_t home_bytes[kRoles][kTiers] = {};
  std::size_t home_peak[kRoles][kTiers] = {};
};

class FrameCache : public std::enable_shared_from_this<FrameCache> {
 public:
  /// `io` replaces the engine that options name: for tests. Throws ConfigError, BudgetError, DiskError.
  static std::shared_ptr<FrameCache> make(const CacheOptions& options, std::unique_ptr<Io> io = nullptr);
  /// The cache of gathered tensors whose shares `local` holds. `device` is null where operators run on the CPU, else
  /// memory of `bytes`.
  static std::shared_ptr<FrameCache> make_gathered(std::shared_ptr<FrameCache> local, std::shared_ptr<Ranks> ranks,
                                                   std::size_t bytes, std::shared_ptr<DeviceMemory> device);
  ~FrameCache();

  /// Gives `segment` a home of spec.bytes, which reads as zeros. Throws BudgetError or DiskError if its tier is full.
  void bind(Segment& segment, const SegmentSpec& spec);
  /// The same for a gathered tensor. It reads as its shares do.
  void bind_gathered(Segment& segment, const GatheredSpec& spec);
  void release(Segment& segment) noexcept;
  /// True if a home of `bytes` can be had in `tier` without moving anything out.
  bool has_room(Tier tier, std::size_t bytes) const;

  /// Of a gathered segment: what operators wrote to it whole goes into this rank's share, and frames that may not be
  /// the same on all ranks are given up. Pinned ones stay. Throws BudgetError, DiskError.
  void store(Segment& segment) { contents_.store(segment); }
  /// This rank's share is about to be written: no frame may hold what was. Throws AccessError if one is pinned.
  void share_changes(Segment& segment) { contents_.share_changes(segment); }

  /// Brings all segments in, whole, and exposes them: all, or none and an exception. A segment may be named twice.
  /// This and pin_page throw VersionOpen (timeline.h) where another thread has opened a version.
  void pin(std::span<const PinRequest> requests) { whole_pins_.pin(requests); }
  /// `thread` took the pins: any thread may let go of them. `failed`: the operator threw, and what it was to
  /// overwrite is what it was.
  void unpin(std::span<const PinRequest> requests, std::uint64_t thread = this_thread_number(),
             bool failed = false) noexcept {
    whole_pins_.unpin(requests, thread, failed);
  }
  /// Says that these segments will be used now, page by page and taking turns: a use in the plan.
  void announce(std::span<const PinRequest> requests) { page_pins_.announce(requests); }
  /// One page, for a rule.
  [[nodiscard]] PagePin pin_page(Segment& segment, std::size_t page, Access access) {
    return page_pins_.pin(segment, page, access);
  }
  /// The same if the page is in memory and there is nothing to wait for, or a frame for overwriting it is free; else
  /// none, and its read begins if memory is free.
  [[nodiscard]] PagePin try_pin_page(Segment& segment, std::size_t page, Access access) {
    return page_pins_.try_pin(segment, page, access);
  }

  // Of a device's cache, for code that runs on the host instead, on the memory below:

  /// Whether the segment can be reached there: it does not share its pages with others.
  bool reaches_below(const Segment& segment) const { return lower_pins_.reaches(segment); }
  /// As announce(), to the cache below.
  void announce_below(std::span<const PinRequest> requests) { lower_pins_.announce(requests); }
  /// A page in host memory. What was newer on the device has come down first; what is written here goes up when the
  /// device needs it next. Empty if something else uses the page on the device, which is not waited for.
  [[nodiscard]] PagePin pin_page_below(Segment& segment, std::size_t page, Access access) {
    return lower_pins_.pin(segment, page, access);
  }
  /// Starts bringing down what is newer on the device, unless it is planned to be written there once more.
  void bring_down(Segment& segment) noexcept { lower_pins_.bring_down(segment); }

  /// Makes the segment read as zeros, without touching memory or disk where it has pages of its own.
  void zero(Segment& segment) { contents_.zero(segment); }
  /// Writes the segment's pages home and gives up its frames. Pinned segments stay.
  void evict(Segment& segment) { contents_.evict(segment); }

  /// Starts to read a page that is on disk alone into `into`, of bytes_of(page) rounded up to whole blocks, leaving
  /// the cache as it is. Empty if it is in memory, was never written, or has no such home: then it is to be pinned.
  /// The segment must outlive the read.
  [[nodiscard]] HomeRead read_home(const Segment& segment, std::size_t page, std::byte* into) {
    return home_reads_.start(segment, page, into);
  }

  /// The segment's content as it is now, for a thread that saves it while others go on: what they write does not
  /// change it. Returns soon; a device's newer pages come down first. Throws VersionOpen, DiskError, and AccessError
  /// of a segment that shares its pages.
  [[nodiscard]] FrozenSegment freeze(Segment& segment);
  /// Where the content of memory that a loader mapped lies in a file, if a segment of tier disk may have its home
  /// there (SegmentSpec::source); else none.
  SourceRange find_source(const void* data, std::size_t bytes) {
    return lower_ ? lower_->find_source(data, bytes) : swap_ ? mapped_files_.find(data, bytes) : SourceRange{};
  }
  /// Whether freeze() takes the segment: it has pages of its own.
  bool can_freeze(const Segment& segment) const {
    return !segment.run()->shares_page() && !segment.run()->gathered();
  }
  /// Of a segment that is pinned whole for writing, and was frozen since: returns when it may be written.
  void write_again(Segment& segment) { whole_pins_.write_again(segment); }

  /// From now on, what is written to the segment goes to a second version of it; only then may the caller pin it,
  /// page by page, until commit or discard. False, and nothing has happened, if its content is not at home on disk,
  /// if it shares pages, is pinned, or the disk has no room to spare. `write_first`: what is newer in memory is
  /// written home, and waited for.
  [[nodiscard]] bool open_version(Segment& segment, bool write_first) { return versions_.open(segment, write_first); }
  /// Starts writing home what is newer in memory, though nothing needs the memory: so that a version can be opened.
  void write_behind(Segment& segment) { versions_.write_behind(segment); }
  /// The second versions become the content. False, and nothing has happened, if one was not written whole.
  [[nodiscard]] bool commit_versions(std::span<Segment* const> segments) { return versions_.commit(segments); }
  /// The content is what it was when the version was opened. Waits for transfers of it. Throws AccessError if the
  /// cache is closed meanwhile.
  void discard_version(Segment& segment) { versions_.discard(segment); }

  /// Another number whenever the segment's content may have changed.
  std::uint64_t changes(const Segment& segment) const;
  /// Whether any page of the segment is in memory.
  bool resident(const Segment& segment) const;

  void wait();   // until no transfer is under way; throws DiskError for a write that failed
  void close();  // gives everything back; segments become husks

  /// Throws AccessError in a forked child and after close().
  void check_usable() const { monitor_.check_usable(); }
  CacheStats stats() const;
  using Usage = Budgets::Usage;
  Usage usage(Pool pool) const;
  /// The most bytes that operators can have pinned at once.
  std::size_t frame_limit() const { return budgets_.device_limit(); }
  /// Whether there never was more to page than fits its memory.
  bool holds_everything() const;
  bool is_gathered() const { return ranks_ != nullptr; }
  bool has_separate_memory() const { return memory_.device() != nullptr; }
  std::size_t page_bytes() const { return page_bytes_; }
  std::string_view io_name() const;
  /// What moves its pages to and from the disk; null where nothing is there. It lives as long as the cache.
  Io* io() const { return lower_ ? lower_->io() : io_.get(); }
  std::size_t swap_bytes() const;

 private:
  using Lock = Monitor::Lock;

  explicit FrameCache(const CacheOptions& options, std::unique_ptr<Io> io);
  FrameCache(std::shared_ptr<FrameCache> local, std::shared_ptr<Ranks> ranks, std::size_t bytes,
             std::shared_ptr<DeviceMemory> device);
  void attach(Segment& segment, Run& run, std::size_t offset, std::size_t bytes);
  void finish_close() noexcept;
  void go_on(Lock& lock);
  void tidy() const;
  void bind_once(Segment& segment, const SegmentSpec& spec);
  void read_ahead();

  mutable Monitor monitor_{[this] { finish_close(); }};
  bool drained_ = false;  // closed, and no transfer is under way
  std::size_t page_bytes_;
  std::vector<std::shared_ptr<void>> registered_;  // slabs of the arena
  FrameMemory memory_;
  Budgets budgets_;
  std::shared_ptr<FrameCache> lower_;  // of the host, under a device's; of this rank's shares, under the gathered one
  std::shared_ptr<Ranks> ranks_;       // null but for the gathered one
  std::unique_ptr<Io> io_;
  std::unique_ptr<SwapFile> swap_;
  std::unique_ptr<Home> home_;  // of runs with no frame of their own
  MappedFiles mapped_files_;
  Timeline timeline_;
  Frames frames_{monitor_, memory_, budgets_, timeline_, is_gathered()};
  Runs runs_{frames_, budgets_, timeline_};
  UpperCache upper_;
  Transfers transfers_{monitor_, memory_, frames_, runs_, home_.get(), [this](Lock& lock) { go_on(lock); }};
  Room room_{monitor_, memory_, timeline_, frames_, transfers_, upper_};
  ReadAhead ahead_{monitor_, memory_, timeline_, frames_, runs_, transfers_, room_, page_bytes_};
  WholePins whole_pins_{monitor_, memory_, budgets_, timeline_, frames_, transfers_, room_, ahead_};
  PagePins page_pins_{monitor_, memory_, budgets_, timeline_, frames_, transfers_, room_, ahead_};
  LowerPins lower_pins_{monitor_, memory_, timeline_, frames_, transfers_, runs_, ranks_ ? nullptr : lower_.get()};
  Versions versions_{monitor_, frames_, transfers_, swap_.get()};
  HomeReads home_reads_{monitor_, swap_ ? home_.get() : nullptr};
  Snapshots snapshots_{monitor_, transfers_, home_reads_};
  Contents contents_{monitor_, memory_, frames_, transfers_, room_, page_pins_};
  HomeAllocator home_allocator_{
      monitor_,   memory_,    budgets_, frames_,
      runs_,      transfers_, room_,    {home_.get(), swap_.get(), lower_.get(), ranks_.get()},
      page_bytes_};
};

}  // namespace zeropage
