// A cache of frames: the pages of one memory's segments that are in memory. It gives segments a home, reads pages
// into frames and writes dirty ones back. The plan decides which pages it reads and evicts. It knows nothing of
// tensors or operators.
//
// Contract: a budget is never exceeded. Every transfer's result is checked. An operation that throws has changed no
// page's content. One lock guards all; it is never held while waiting (monitor.h). After close(), and in a forked
// child, every call that needs the bytes throws AccessError.
//
// Each layer of the cache has a file, keeps its own data under the one lock, and uses none listed below it:
//
//   Monitor               the lock, and how threads wait
//   FrameMemory, Budgets  memory, and who may use how much of it
//   Timeline              the program's uses, and its progress
//   Frames                pins, the life of a frame, the next victim
//   Runs                  the living runs, and their bytes at home
//   Transfers             reads and writes in flight; each calls go_on when it ends
//   Gate                  what stands in the way of a page, and waiting for it
//   Grants                memory for all that an operator pins, in turn
//   Room                  memory for new frames, and eviction to free it
//   ReadAhead             prefetches along the plan
//   WholePins, PagePins   the pins of operators and of rules
//   LowerPins             pins of a device's pages by code on the host
//   Contents              zeroing and eviction of whole segments
//   HomeReads             reads that bypass the cache
//   Versions              updates written before the program asks for them
//   Snapshots             content that a checkpoint writes while training goes on
//   HomeAllocator         picks the run and the home of a new segment
//
// [Note: one memory] If operators run on the CPU, frames and cached disk pages share one arena of device_memory +
// host_memory bytes. Operators' pins plus homes of tier device never exceed device_memory. Homes of tier host never
// exceed host_memory. All of these plus cached pages never exceed the sum. Host and device homes are frames that
// never leave.
//
// [Note: two memories] A device with memory of its own has two caches, one above the other. The upper cache's frames
// are in device memory. It treats host and disk homes alike: both are pages of the lower cache (LowerCacheHome).
//
// [Note: gathered] Tensors that are partitioned over ranks have their own cache, above the cache of this rank's
// shares (ShardedHome). Its content decides which collectives run. It follows only from sizes and from the sequence
// of pins, creations and expected changes. Nothing local may decide there, such as a disk's speed or a death. Reads
// ahead start when an operator pins, never when a transfer ends. The frame of a dead tensor stays until its turn. A
// parameter that died on this rank is gathered as long as the plan says so, since it may live on others.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zeropage/base/units.h"
#include "zeropage/comm/ranks.h"
#include "zeropage/pager/cache/budgets.h"
#include "zeropage/pager/cache/frame_memory.h"
#include "zeropage/pager/cache/frames.h"
#include "zeropage/pager/cache/grants.h"
#include "zeropage/pager/cache/lower_pins.h"
#include "zeropage/pager/cache/memory_claim.h"
#include "zeropage/pager/cache/monitor.h"
#include "zeropage/pager/cache/page_pins.h"
#include "zeropage/pager/cache/room.h"
#include "zeropage/pager/cache/runs.h"
#include "zeropage/pager/cache/transfers.h"
#include "zeropage/pager/cache/whole_pins.h"
#include "zeropage/pager/foresight/read_ahead.h"
#include "zeropage/pager/foresight/timeline.h"
#include "zeropage/pager/homes/contents.h"
#include "zeropage/pager/homes/home.h"
#include "zeropage/pager/homes/home_allocator.h"
#include "zeropage/pager/homes/home_reads.h"
#include "zeropage/pager/homes/snapshots.h"
#include "zeropage/pager/homes/versions.h"
#include "zeropage/pager/upper_cache.h"
#include "zeropage/store/mapped_files.h"

namespace zeropage {

struct CacheOptions {
  std::size_t device_bytes = 0;
  std::size_t host_bytes = 0;
  std::string disk_path;  // one or several, as split_disk_path() takes them; empty: no disk tier
  std::size_t page_bytes = 4 * kMiB;
  IoOptions io = {};
  std::chrono::milliseconds memory_timeout{60'000};  // longest wait for memory that others' lasting pins hold
  std::shared_ptr<DeviceMemory> device = nullptr;    // null: operators run on the CPU
  /// Called when a slab of host memory is first used. The cache keeps the handle as long as the slab.
  std::function<std::shared_ptr<void>(std::span<std::byte>)> register_memory = nullptr;
  std::optional<Hollow> hollow = std::nullopt;  // stores nothing; needs an engine that only models time
};

struct CacheStats {
  std::size_t faults = 0;                                // times an operator or rule met a page without a frame.
  std::size_t evictions = 0;                             // frames that left memory.
  std::size_t read_bytes = 0;                            // from disk.
  std::size_t written_bytes = 0;                         // to disk.
  double disk_seconds = 0;                               // with a transfer from or to disk in flight.
  std::size_t uploaded_bytes = 0, downloaded_bytes = 0;  // to and from a device with memory of its own.
  BookedTime::Seconds spent = {};                        // by cause, of the program's threads, in all caches.
  std::size_t surprises = 0;                             // uses that were not planned.
  std::size_t source_bytes = 0;                          // at home in files that are only read.
  std::size_t home_bytes[kRoles][kTiers] = {};
  std::size_t home_peak[kRoles][kTiers] = {};
};

class FrameCache : public std::enable_shared_from_this<FrameCache> {
 public:
  /// `io` replaces the engine of the options, and `swap` its swap file, for tests. Throws ConfigError, BudgetError,
  /// DiskError.
  static std::shared_ptr<FrameCache> make(const CacheOptions& options, std::unique_ptr<Io> io = nullptr,
                                          std::shared_ptr<SwapFile> swap = nullptr);
  /// The cache of gathered tensors whose shares `local` holds. `device` is null if operators run on the CPU, else it
  /// has memory of `bytes`. `secondary`: parameters have a secondary partition there, unless all ranks are one node.
  static std::shared_ptr<FrameCache> make_gathered(std::shared_ptr<FrameCache> local, std::shared_ptr<Ranks> ranks,
                                                   std::size_t bytes, std::shared_ptr<DeviceMemory> device,
                                                   std::optional<Tier> secondary = std::nullopt);
  ~FrameCache();

  /// Gives `segment` a home of spec.bytes, which reads as zeros. Throws BudgetError or DiskError if its tier is full.
  void bind(Segment& segment, const SegmentSpec& spec);
  /// The same for a gathered tensor. It reads as its shares do.
  void bind_gathered(Segment& segment, const GatheredSpec& spec);
  void release(Segment& segment) noexcept;
  /// Whether `tier` can give a home of `bytes` without an eviction.
  bool has_room(Tier tier, std::size_t bytes) const;

  /// For a gathered segment: moves what operators wrote to the whole tensor into this rank's share, and drops frames
  /// that may differ between ranks. Pinned frames stay. Throws BudgetError, DiskError.
  void store(Segment& segment) { contents_.store(segment); }
  /// Drops frames with the old content before this rank's share is written. Throws AccessError if one is pinned.
  void share_changes(Segment& segment) { contents_.share_changes(segment); }
  /// For a gathered segment: how ranks send it, unless it shares a page. Call it before any gather.
  void set_coding(Segment& segment, Coding coding);
  /// Gathers it without a coding until its shares change, because an operator will write the whole tensor. Ranks call
  /// it alike. Throws AccessError if it is pinned.
  void gather_exactly(Segment& segment) { contents_.gather_exactly(segment); }
  /// Whether the next gather has a coding.
  bool is_coded(const Segment& segment) const;

  /// For a gathered segment: tells that an operator will write its shares, and gives up its frames, which are of no
  /// use any more. Ranks call it alike. The segment is not read ahead until take_changes() has named it. Throws
  /// errors of reads under way.
  void expect_change(Segment& segment);
  /// Before an operator pins `requests`: visits, under the cache's lock, the segments to change now, so that they can
  /// be read ahead. None if the operator may run on this rank alone, which finds its tensors pinned. How far it looks
  /// follows from the plan alone. Ranks may differ in which tensors live, and which still wait for an operator.
  void take_changes(std::span<const PinRequest> requests, const std::function<void(Segment&)>& visit);

  /// Reads all segments into memory, each in one piece, and exposes them: all, or none and an exception. A segment
  /// may be named twice. pin() and pin_page() throw VersionOpen (timeline.h) if another thread has opened a version.
  /// Returns the bytes of options.extra that were granted, for unpin().
  std::size_t pin(std::span<const PinRequest> requests, const PinOptions& options = {}) {
    return whole_pins_.pin(requests, options);
  }
  /// `thread` is the one that took the pins; any thread may drop them. `failed`: the operator threw, and segments
  /// that it was to overwrite keep their content.
  void unpin(std::span<const PinRequest> requests, const PinOptions& options = {},
             std::uint64_t thread = this_thread_number(), bool failed = false) noexcept {
    whole_pins_.unpin(requests, options, thread, failed);
  }
  /// Announces one use in the plan: the caller will now use these segments page by page, in turns.
  void announce(std::span<const PinRequest> requests) { page_pins_.announce(requests); }
  /// For a walk that goes on between later uses, by try_pin_page(), until close_stream(). Their next pages are read
  /// while the disk has nothing else to do. It is no use in the plan, because it may begin anywhere.
  void open_stream(std::span<const PinRequest> requests) { page_pins_.open_stream(requests); }
  /// Puts the segment's stream, if it has one, before all others.
  void hurry_stream(const Segment& segment) { page_pins_.hurry_stream(segment); }
  /// Whether the plan knows a use of the segment to come.
  bool expects_use(const Segment& segment) const;
  void close_stream(std::span<const PinRequest> requests) noexcept { page_pins_.close_stream(requests); }
  /// Tells that such a walk has used the segment's pages before this one. `begun`: and a part of this one.
  void reach_in_stream(const Segment& segment, std::size_t page, bool begun = false) noexcept {
    page_pins_.reach_in_stream(segment, page, begun);
  }
  /// Keeps memory for a walk over these segments, which pins up to two pages of each at a time. Waits for it. A
  /// thread that pins several pages at once claims them first: it must not wait for memory while it holds some.
  [[nodiscard]] MemoryClaim claim(std::span<const PinRequest> requests);
  /// One page, for a rule.
  [[nodiscard]] PagePin pin_page(Segment& segment, std::size_t page, Access access) {
    return page_pins_.pin(segment, page, access);
  }
  /// The same without waiting: succeeds if the page is in memory and idle, or if a frame to overwrite it is free.
  /// Otherwise returns no pin; reading ahead brings the page if it is planned.
  /// `is_brief`: until the pin ends, the caller waits for nothing. Then a page in memory needs no grant.
  [[nodiscard]] PagePin try_pin_page(Segment& segment, std::size_t page, Access access, bool is_brief = false) {
    return page_pins_.try_pin(segment, page, access, {.is_brief = is_brief});
  }
  /// The same, and also starts to read the page if memory is free: PagePin::wait() then waits for the disk.
  [[nodiscard]] PagePin try_bring_page(Segment& segment, std::size_t page, Access access) {
    return page_pins_.try_pin(segment, page, access, {.brings = true});
  }

  // For a device's cache: pins in the host memory below it, for code that runs on the host.

  /// Whether such code can pin the segment: it must not share its pages with others.
  bool reaches_below(const Segment& segment) const { return lower_pins_.reaches(segment); }
  /// Like announce(), for the cache below.
  void announce_below(std::span<const PinRequest> requests) { lower_pins_.announce(requests); }
  /// The same for claim().
  [[nodiscard]] MemoryClaim claim_below(std::span<const PinRequest> requests) { return lower_pins_.claim(requests); }
  /// A page in host memory. A newer content on the device is downloaded first, and the device uploads the page again
  /// at its next use. Returns an empty pin, without waiting, if something uses the page on the device.
  [[nodiscard]] PagePin pin_page_below(Segment& segment, std::size_t page, Access access) {
    return lower_pins_.pin(segment, page, access);
  }
  /// Starts to download pages that are newer on the device, unless the plan says it will write them again.
  void bring_down(Segment& segment) noexcept { lower_pins_.bring_down(segment); }

  /// Makes the segment read as zeros. A segment with pages of its own costs no memory or disk traffic.
  void zero(Segment& segment) { contents_.zero(segment); }
  /// Makes slots, one a page, the home of the segment's content. A null slot leaves its page as it is. No byte is
  /// read until a page is used. Returns false, and changes nothing here, if the segment has no pages of its own on
  /// disk or is in use.
  [[nodiscard]] bool map(Segment& segment, std::span<const SlotRef> slots) { return contents_.map(segment, slots); }
  /// Writes the segment's pages home and drops its frames. Pinned segments stay.
  void evict(Segment& segment) { contents_.evict(segment); }

  /// Starts to read a page that is only on disk into `into`, of bytes_of(page) rounded up to whole blocks. The cache
  /// stays as it is. Returns an empty read if the page is in memory, was never written or has no disk home: pin it
  /// instead. The segment must outlive the read.
  [[nodiscard]] HomeRead read_home(const Segment& segment, std::size_t page, std::byte* into) {
    return home_reads_.start(segment, page, into);
  }
  /// The same for `bytes` of the page from `at` on, both multiples of 4 KiB up to the page's last block. A page that
  /// was never written gives zeros. Also returns an empty read if the page's home is in a file that is only read. The
  /// read goes before other transfers.
  [[nodiscard]] HomeRead read_part_of_home(const Segment& segment, std::size_t page, std::size_t at,
                                           std::size_t bytes, std::byte* into) {
    return home_reads_.start_part(segment, page, at, bytes, into);
  }

  /// The same for a segment with an open version: the content before it, also for the thread that writes the version.
  /// Returns an empty read if no version is open.
  [[nodiscard]] HomeRead read_before_version(const Segment& segment, std::size_t page, std::size_t at,
                                             std::size_t bytes, std::byte* into) {
    return home_reads_.start_before_version(segment, page, at, bytes, into);
  }

  /// A snapshot of the segment's content, for a thread that saves it: later writes do not change it. Returns soon,
  /// except that a device's newer pages are downloaded first. Throws VersionOpen, DiskError, and AccessError for a
  /// segment that shares its pages.
  [[nodiscard]] FrozenSegment freeze(Segment& segment);
  /// Finds the file range behind memory that a loader mapped, if a segment of tier disk may have its home there
  /// (SegmentSpec::source); else returns none.
  SourceRange find_source(const void* data, std::size_t bytes) {
    return lower_ ? lower_->find_source(data, bytes) : swap_ ? mapped_files_.find(data, bytes) : SourceRange{};
  }
  /// Whether freeze() takes the segment: it has pages of its own.
  bool can_freeze(const Segment& segment) const {
    return !segment.run()->shares_page() && !segment.run()->gathered();
  }
  /// For a segment that was frozen after it was pinned whole for writing: returns when it may be written.
  void write_again(Segment& segment) { whole_pins_.write_again(segment); }

  /// Opens a second version of the segment, which takes all writes from now on. Only the caller may then pin the
  /// segment, page by page, until commit or discard. Returns false, without effect, if the segment's content is not
  /// at home on disk, shares pages or is pinned, or if the disk has no spare room. `write_first`: first writes newer
  /// pages home, and waits.
  [[nodiscard]] bool open_version(Segment& segment, bool write_first) { return versions_.open(segment, write_first); }
  /// Starts to write newer pages home although nothing needs their memory, so that a version can be opened.
  void write_behind(Segment& segment) { versions_.write_behind(segment); }
  /// Makes the second versions the content. Returns false, without effect, if one was not written completely.
  [[nodiscard]] bool commit_versions(std::span<Segment* const> segments) { return versions_.commit(segments); }
  /// Restores the content of the moment when the version was opened. Waits for the segment's transfers. Throws
  /// AccessError if the cache is closed meanwhile.
  void discard_version(Segment& segment) { versions_.discard(segment); }

  bool has_version(const Segment& segment) const;
  /// For a gathered segment: whether no frame of it is in use, moving, or newer than the shares.
  bool is_unused(const Segment& segment) const;

  /// A number that grows whenever the segment's content may have changed.
  std::uint64_t changes(const Segment& segment) const;
  /// Whether any page of the segment is in memory.
  bool resident(const Segment& segment) const;

  void wait();   // until no transfer is in flight; throws DiskError if a write failed
  void close();  // releases everything; segments become husks

  /// Throws AccessError in a forked child and after close().
  void check_usable() const { monitor_.check_usable(); }
  CacheStats stats() const;
  /// The book for the time of work on its tensors.
  BookedTime& booked() const { return monitor_.booked(); }
  using Usage = Budgets::Usage;
  Usage usage(Pool pool) const;
  /// The most bytes that are read before their use.
  std::size_t most_read_ahead() const { return ahead_.most_ahead(); }
  /// The most bytes that operators can have pinned at once.
  std::size_t frame_limit() const { return budgets_.device_limit(); }
  /// Whether the peak of all pageable bytes fits its memory.
  bool holds_everything() const;
  bool is_gathered() const { return ranks_ != nullptr; }
  bool has_separate_memory() const { return memory_.device() != nullptr; }
  std::size_t page_bytes() const { return page_bytes_; }
  std::string_view io_name() const;
  /// The engine that moves its pages to and from the disk; null without a disk. It lives as long as the cache.
  Io* io() const { return lower_ ? lower_->io() : io_.get(); }
  std::size_t swap_bytes() const;

 private:
  friend class MemoryClaim;
  using Lock = Monitor::Lock;

  FrameCache(const CacheOptions& options, std::unique_ptr<Io> io, std::shared_ptr<SwapFile> swap);
  FrameCache(std::shared_ptr<FrameCache> local, std::shared_ptr<Ranks> ranks, std::size_t bytes,
             std::shared_ptr<DeviceMemory> device, std::optional<Tier> secondary);
  void attach(Segment& segment, Run& run, std::size_t offset, std::size_t bytes);
  void finish_close() noexcept;
  void go_on(Lock& lock);
  void tidy() const;
  void bind_once(Segment& segment, const SegmentSpec& spec);
  void read_ahead();

  mutable Monitor monitor_{[this] { finish_close(); }};
  bool drained_ = false;  // closed, and no transfer is in flight
  std::size_t page_bytes_;
  const std::chrono::milliseconds longest_wait_;
  std::vector<std::shared_ptr<void>> registered_;  // slabs of the arena
  FrameMemory memory_;
  Budgets budgets_;
  std::shared_ptr<FrameCache> lower_;  // the host's, under a device's; of this rank's shares, under the gathered
  std::shared_ptr<Ranks> ranks_;       // null except for the gathered cache
  std::optional<Tier> secondary_;      // of its secondary partition; none: there is none
  std::unique_ptr<Io> io_;
  std::shared_ptr<SwapFile> swap_;
  std::unique_ptr<Home> home_;  // of runs without a frame of their own
  MappedFiles mapped_files_;
  Timeline timeline_;
  Frames frames_{monitor_, memory_, budgets_, timeline_, is_gathered()};
  Runs runs_{frames_, budgets_, timeline_};
  UpperCache upper_;
  Transfers transfers_{monitor_, memory_, frames_, runs_, home_.get(), [this](Lock& lock) { go_on(lock); }};
  Grants grants_{monitor_, budgets_, memory_, frames_, upper_, longest_wait_};
  Room room_{monitor_, memory_, timeline_, frames_, transfers_, grants_};
  ReadAhead ahead_{monitor_, memory_, timeline_, frames_, runs_, transfers_, room_, page_bytes_};
  WholePins whole_pins_{monitor_, memory_, budgets_, timeline_, frames_, transfers_, grants_, room_, ahead_};
  PagePins page_pins_{monitor_, memory_, budgets_, timeline_, frames_, transfers_, grants_, room_, ahead_};
  LowerPins lower_pins_{monitor_, memory_, timeline_, frames_, transfers_, runs_, ranks_ ? nullptr : lower_.get()};
  Versions versions_{monitor_, frames_, transfers_, swap_.get()};
  HomeReads home_reads_{monitor_, swap_ ? home_.get() : nullptr};
  Snapshots snapshots_{monitor_, transfers_, home_reads_};
  Contents contents_{monitor_, memory_, frames_, transfers_, room_, page_pins_};
  HomeAllocator home_allocator_{
      monitor_,   memory_, budgets_,
      frames_,    runs_,   transfers_,
      grants_,    room_,   {home_.get(), swap_.get(), lower_.get(), ranks_.get(), secondary_},
      page_bytes_};
};

}  // namespace zeropage
