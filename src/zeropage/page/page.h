// Pages, runs, frames and segments: what a cache keeps about each byte of training state. Plain records; only the
// cache changes them, under its lock.
//
//   segment ──▶ run ──▶ page, page, page ──▶ frame (memory, if any)
//                └──▶ home: an extent on disk, pages of a lower cache, or this rank's shares; none: the frame is it
//
// A run is a stretch of bytes that stays together: in its home and, while an operator uses it, in one frame. A large
// tensor has a run of its own with many pages; small tensors share a run of one page.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <vector>

#include "zeropage/base/units.h"
#include "zeropage/io/arena.h"
#include "zeropage/io/free_list.h"
#include "zeropage/io/io.h"
#include "zeropage/page/kinds.h"
#include "zeropage/store/budget.h"
#include "zeropage/store/device_memory.h"
#include "zeropage/store/slot.h"

namespace zeropage {

/// The state of a page's bytes. One word, so that no two flags can disagree. In `zero` and `evicted`, a page with a
/// frame is about to be overwritten there by the holder of the frame's pin.
enum class Residency : std::uint8_t {
  zero,       // Never written: it reads as zeros and is stored nowhere.
  evicted,    // At home only.
  reading,    // A read from home into a frame is in flight.
  clean,      // In a frame, and the same at home.
  dirty,      // In a frame, newer than at home.
  writing,    // In a frame. The same bytes are being written home.
  rewritten,  // In a frame, newer than the bytes that are being written home.
};

/// Which of a cache's two budgets.
enum class Pool : std::uint8_t { device, host };

struct Run;
class Segment;
class Home;

/// One tensor of a gathered run: its offset in the run, and the segment with this rank's part of it.
struct Share {
  Segment* segment;        // null: the tensor died; its slot stays.
  std::size_t offset;      // in the run.
  std::size_t part_bytes;  // of each rank's part; 0 if the tensor has the run to itself.
  Segment* whole;          // the tensor's own segment; null: it died.
  mutable int users = 0;   // transfers that use the share without a lock; it must outlive them
};

/// A second partition of a gathered run, over the ranks of each node. After a gather over all ranks, each rank of a
/// node keeps a part of each page. The next gathers stay inside the node until the content changes (hpZ; Wang et al.,
/// "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training").
struct SecondaryPartition {
  Tier tier;
  std::shared_ptr<Segment> share;  // this rank's parts, in the cache below. Null: none yet, or the tensors died here
  std::vector<bool> has_page;      // whether all ranks of the node have kept their parts of it
  std::uint64_t changes = 0;       // of the run's content
};

/// The bytes of one rank's part of a page of `bytes`.
inline std::size_t secondary_part(std::size_t bytes, std::size_t ranks_of_node) {
  constexpr std::size_t kUnit = 64;  // of tensors in a shared page. Parts of larger pages are multiples of a block
  return round_up(ceil_div(bytes, ranks_of_node), kUnit);
}

/// The content of a run at one moment, until a checkpoint has it (pager/homes/snapshots.h).
struct Frozen {
  enum class Place : std::uint8_t {
    nowhere,  // zeros
    home,     // in a slot
    frame,    // only in a frame, or being written home. The page may not be written
    copying,  // the same, and the checkpoint is copying it
  };
  struct Page {
    Place place = Place::nowhere;
    SlotRef slot = nullptr;
    bool older_on_its_way = false;  // if a write home is in flight, it carries an older content than the frame's
  };
  Run* run;  // null: the run died, and the content that only its frames held died too
  std::vector<Page> pages;
};

/// Memory that holds consecutive pages of one run: all of them while an operator needs the whole tensor, one while a
/// rule works page by page. `permanent` frames are the home of their run and never leave.
struct Frame {
  Run* run = nullptr;         // null: it died
  std::uint32_t ordinal = 0;  // of the run, in the plan
  std::uint64_t number = 0;   // serial number among its memory's frames, from 1
  bool shares_page = false;   // the run has several tensors
  std::size_t run_pages = 1;  // of the run
  std::size_t first_page = 0;
  std::size_t pages = 0;
  Block memory;
  Reservation charge;
  bool permanent = false;
  bool assembling = false;      // not all of its pages point to it.
  bool ahead = false;           // read ahead, and not used yet.
  std::uint64_t ahead_for = 0;  // the use it was read for, in the plan's time.
  std::uint64_t ahead_in = 0;   // the plan's surprises when it was read.
  bool transient = false;       // its last user will not use it again soon.
  int pins = 0;                 // held by operators and rules.
  std::uint64_t charged = 0;    // the thread that took the first of these pins.
  int whole_pins = 0;           // the part of them that operators hold.
  std::thread::id claimer;      // the thread that is about to overwrite it.
  bool clearing = false;        // a thread fills it with zeros, without the lock.
  bool reverting = false;       // its operator failed: pages get their earlier content with the last pin.
  std::size_t transfers = 0;    // in flight for its pages.
  int starting = 0;             // threads that are starting reads into it, perhaps without the lock.
  std::exception_ptr failure;   // of a read into it.
  // Per page, the state to restore if its overwriting fails; `clean` where no overwriting is under way. May be empty.
  std::vector<Residency> promised;
  DeviceMemory::Event ready;      // when it was filled; null for CPU memory and once past.
  DeviceMemory::Event last_used;  // when it was last used.
  // For the queue of victims:
  std::set<Frame*>::node_type place;  // its node while it is not queued, so that queueing it cannot fail
  int cost = -1;                      // transfers that its eviction causes; -1: not queued
  std::uint64_t next_use = 0;         // planned, in the plan's time
  std::uint64_t last_use = 0;
};

struct Page {
  Residency state = Residency::zero;
  bool lent = false;          // code on the host has it (pager/cache/lower_pins.h).
  bool is_new = false;        // belongs to the open second version (pager/homes/versions.h).
  bool write_failed = false;  // the latest write home failed.
  Frame* frame = nullptr;
  // For a run on disk:
  SlotRef home;    // holds the home content. Null: none yet
  SlotRef target;  // takes the next write home. Null: `home` does. With is_new it holds the second version
};

struct Run {
  Run() = default;
  ~Run();
  Role role;
  Tier tier;
  std::size_t bytes;
  std::size_t page_bytes;
  std::vector<Page> pages;
  Home* home = nullptr;  // null: its frame is its home
  bool is_on_disk = false;
  bool has_version = false;                        // a second version is open
  std::thread::id writer;                          // the only thread that may pin the run then.
  std::shared_ptr<Frozen> frozen;                  // null: no checkpoint needs the content of its pages.
  std::unique_ptr<Segment> below;                  // in a lower cache.
  std::optional<FreeList> slots;                   // for shared runs: the free parts of the page.
  std::vector<FreeList::Entry> entries = {};       // for shared runs: one for each tensor, to release its part.
  std::size_t tensors = 0;                         // segments alive in it.
  std::uint32_t ordinal = 0;                       // in the plan.
  std::uint64_t stream_use = 0;                    // number of the use that streams its pages one by one.
  std::uint64_t stream_begin = 0, stream_end = 0;  // of that use's group, in the plan's time.
  std::size_t stream_page = ~std::size_t{0};       // the first page of the stream that has not been taken yet.
  bool stream_lasts = false;                       // in a lasting stream ([Note: lasting streams] in read_ahead.h)
  std::size_t lasting_page = 0;                    // its first page that is still to be taken, if so.
  std::uint64_t scan = 0;                          // the latest scan for missing pages that counted it.
  std::size_t transfers = 0;                       // in flight, plus lent pages. A dead run lives until they end.
  std::size_t lent = 0;                            // pages.
  std::uint64_t changes = 0;                       // of its content, as far as pins for writing show.
  bool dead = false;
  bool is_staging = false;     // counts against its budget, but not as a home.
  Segment* only = nullptr;     // the tensor it was made for, if it serves one; null once that died.
  bool listed = false;         // among the runs that may have room.
  Frame* assembled = nullptr;  // the frame in which a thread is assembling the whole run.
  int filling = 0;             // threads that copy without the lock, before they hold the run whole.
  // For gathered runs:
  bool is_gathered = false, is_packed = false;  // fixed at creation: read without the lock
  bool expects_change = false;                  // of its shares: FrameCache::expect_change()
  std::vector<Share> shares;
  std::uint64_t number = 0;                       // of its first tensor, the same on all ranks
  std::atomic<std::uint64_t> program_writes = 0;  // Segment::note_program_write()
  std::size_t packed_bytes = 0;  // bytes given out to tensors that share the page, dead ones included
  std::unique_ptr<SecondaryPartition> secondary;  // null: none
  Coding coding = Coding::none;                   // of its gathers until the content changes
  Coding usual_coding = Coding::none;             // and afterwards

  bool gathered() const { return is_gathered; }
  bool packed() const { return is_packed; }
  /// Whether its frames can leave memory.
  bool has_home_elsewhere() const { return home != nullptr; }
  bool shares_page() const { return slots || packed(); }

  std::size_t bytes_of(std::size_t page) const { return std::min(page_bytes, bytes - page * page_bytes); }
  /// The content changes, so that the secondary partition is of no more use.
  void outdate_secondary() const {
    if (!secondary) return;
    ++secondary->changes;
    secondary->has_page.assign(pages.size(), false);
  }
  /// The slot with the page's newest content on disk, and the one that takes its next write. For a run on disk.
  const Slot& slot_of(std::size_t page) const { return pages[page].is_new ? *pages[page].target : *pages[page].home; }
  const Slot& slot_to_write(std::size_t page) const {
    return pages[page].target ? *pages[page].target : *pages[page].home;
  }
  /// Whether a write of the page has a slot to go to.
  bool has_slot_to_write(std::size_t page) const {
    return !is_on_disk || pages[page].target || is_sole_and_writable(pages[page].home);
  }
  /// Whether a checkpoint still needs the content of the page's frame. Then nothing may write it.
  bool is_owed(std::size_t page) const { return frozen && frozen->pages[page].place >= Frozen::Place::frame; }
  /// Whether another thread has a version open.
  bool is_closed_to_this_thread() const { return has_version && writer != std::this_thread::get_id(); }
  /// The frame with the content of all pages; null if there is none.
  Frame* whole_frame() const {
    Frame* frame = pages[0].frame;
    const bool has_content = pages[0].state != Residency::evicted && pages[0].state != Residency::zero;
    return frame && frame->pages == pages.size() && !frame->assembling && has_content ? frame : nullptr;
  }
};

class FrameCache;
class WholePins;

struct SegmentSpec {
  std::size_t bytes;
  std::size_t row_bytes;  // pages end on rows where row and block sizes allow it
  Role role;
  Tier tier;
  std::size_t page_bytes = 0;  // 0: the cache's own, on rows
  bool alone = false;          // shares no page, however small it is
  bool is_staging = false;     // no home: memory for data that a cache above passes through
  SourceRange source = {};     // for tier disk: holds the content until it is written. None: zeros
  bool is_unset = false;       // the caller overwrites it before anything reads it; no need for zeros
  /// By page: the bytes from `source` to its content, or kNotInFile. Empty: one page after another.
  std::vector<std::uint64_t> source_pages = {};
  static constexpr std::uint64_t kNotInFile = ~std::uint64_t{0};
};

/// A tensor that is partitioned over ranks. Each page holds every rank's part of it, in rank order.
struct GatheredSpec {
  std::size_t bytes;         // of the tensor
  std::size_t padded_bytes;  // with every rank's last part padded to full size
  std::size_t page_bytes;
  Role role;
  Segment* share;        // this rank's parts, one after another; must outlive the segment
  std::uint64_t number;  // the same on all ranks
  bool alone;            // shares no page, because other ranks may create it at another time
};

/// The storage behind one paged tensor and all its views. Derived classes publish the address of the bytes.
class Segment {
 public:
  virtual ~Segment() = default;
  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const std::shared_ptr<FrameCache>& cache() const { return cache_; }
  std::size_t bytes() const { return bytes_; }
  /// True while pinned. Racy unless the caller holds a pin.
  bool is_pinned() const { return pins_ > 0; }
  /// Whether it never leaves memory: its frame is its home.
  bool is_always_in_memory() const { return run_ && !run_->home; }
  Role role() const { return run_->role; }
  Tier tier() const { return run_->tier; }
  std::size_t pages() const { return run_->pages.size(); }
  /// Bytes of every page but the last.
  std::size_t page_bytes() const { return run_->shares_page() ? bytes_ : run_->page_bytes; }
  std::size_t bytes_of(std::size_t page) const {
    return run_->shares_page() ? bytes_ : std::min(run_->bytes_of(page), bytes_ - page * run_->page_bytes);
  }

  /// The program has called an operator that writes the parameter, or another tensor that is the same on all ranks,
  /// as all ranks' programs must. Ranks compare the numbers of such calls when they gather it.
  void note_program_write() {
    program_writes_.fetch_add(1, std::memory_order_relaxed);
    if (run_) run_->program_writes.fetch_add(1, std::memory_order_relaxed);
  }
  std::uint64_t program_writes() const { return program_writes_.load(std::memory_order_relaxed); }

  /// For the cache. Null after release().
  Run* run() const { return run_; }
  std::size_t offset() const { return offset_; }

  /// Whether an operator that writes it was called and has yet to run. The same on all ranks.
  virtual bool will_change() const { return false; }
  /// The same for operators that will run in the host memory below a device's.
  virtual bool will_change_below() const { return false; }

 protected:
  /// Called under the cache's lock when the first pin is taken and the last one dropped.
  virtual void expose(std::byte* data) = 0;
  virtual void hide() = 0;

 private:
  friend class FrameCache;
  friend class WholePins;
  std::shared_ptr<FrameCache> cache_;
  Run* run_ = nullptr;
  std::size_t offset_ = 0;  // in the run: 0 unless shared
  std::size_t bytes_ = 0;
  int pins_ = 0;
  std::atomic<std::uint64_t> program_writes_ = 0;
};

struct PinRequest {
  Segment* segment;
  Access access;
};

}  // namespace zeropage
