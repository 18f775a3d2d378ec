// Pages, runs, frames and segments: what a cache keeps about each byte of training state. Plain records; only the
// cache changes them, under its lock.
//
//   segment ──▶ run ──▶ page, page, page ──▶ frame (memory, if any)
//                └──▶ home: an extent on disk, pages of a lower cache, or this rank's shares; none: the frame is it
//
// A run is what lies together: in its home and, while an operator uses it, in one frame. A large tensor has a run of
// its own with many pages; small tensors share a run of one page.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <vector>

#include "zeropage/io/arena.h"
#include "zeropage/io/free_list.h"
#include "zeropage/io/io.h"
#include "zeropage/store/budget.h"
#include "zeropage/store/device_memory.h"
#include "zeropage/store/source_file.h"
#include "zeropage/store/swap_file.h"

namespace zeropage {

enum class Role : std::uint8_t { parameter, gradient, optimizer, activation };
enum class Tier : std::uint8_t { device, host, disk };
inline constexpr int kRoles = 4, kTiers = 3;
std::string_view name_of(Role role);
std::string_view name_of(Tier tier);

/// Where a page's bytes are. One word, so that no two flags can disagree. A page that is zero or evicted and has a
/// frame is about to be overwritten there by the holder of the frame's pin.
enum class Residency : std::uint8_t {
  zero,       // never written: reads as zeros, and nothing holds it
  evicted,    // at home only
  reading,    // on its way from home into a frame
  clean,      // in a frame, the same as at home
  dirty,      // in a frame, newer than at home
  writing,    // in a frame, the same as what is on its way home
  rewritten,  // in a frame, newer than what is on its way home
};

/// What an operator does to a page. `overwrite` promises to write every byte, so nothing need be read.
enum class Access : std::uint8_t { read, write, overwrite };

/// Which of a cache's two budgets.
enum class Pool : std::uint8_t { device, host };

struct Run;
class Segment;
class Home;

/// One tensor of a gathered run: where it lies there, and the segment that holds this rank's part of it.
struct Share {
  Segment* segment;        // null: the tensor died, its place stays
  std::size_t offset;      // in the run
  std::size_t part_bytes;  // of each rank, of tensors that share the run
  mutable int users = 0;   // transfers that use the segment, with no lock: it must not die meanwhile
};

/// Where pages of a run lie on disk: in the swap file, or in a file that is only read. What a checkpoint that is
/// being written holds together with the run, nothing writes.
struct Backing {
  Extent extent;
  SourceRange source;     // if there is no extent
  std::size_t pages = 0;  // of the run, whose content at home lies here
};

/// The content of a run at one moment, until a checkpoint has it (pager/snapshots.h).
struct Frozen {
  enum class Place : std::uint8_t {
    nowhere,  // zeros
    home,     // in a backing
    frame,    // in a frame alone, or on its way home. The page may not be written
    copying,  // the same, and it is being copied
  };
  struct Page {
    Place place = Place::nowhere;
    const Backing* backing = nullptr;
    bool older_on_its_way = false;  // home: not what is in the frame
  };
  Run* run;  // null: it died, with what was in its frames alone
  std::size_t page_bytes;
  std::vector<Page> pages;
  std::vector<std::shared_ptr<Backing>> backings;  // of these pages
  std::shared_ptr<Backing> closing;  // where to what is in frames is written home; null: the frames are homes
};

/// Memory that holds consecutive pages of one run: all of them while an operator needs the tensor whole, one while a
/// rule works page by page. `permanent` frames are the home of their run and never leave.
struct Frame {
  Run* run = nullptr;         // null: it died
  std::uint32_t ordinal = 0;  // of the run, in the plan
  std::uint64_t number = 0;   // frames that its memory has made, with this one
  bool shares_page = false;   // the run has several tensors
  std::size_t run_pages = 1;  // of the run
  std::size_t first_page = 0;
  std::size_t pages = 0;
  Block memory;
  Reservation charge;
  bool permanent = false;
  bool assembling = false;      // not all of its pages point to it
  bool ahead = false;           // it was read ahead, and has not been used
  std::uint64_t ahead_for = 0;  // the use it was read for, in the plan's time
  std::uint64_t ahead_in = 0;   // surprises of the plan that said so
  bool transient = false;       // its last user says that it will not be used soon
  int pins = 0;                 // of operators and rules
  int whole_pins = 0;           // of them, of operators
  std::thread::id claimer;      // that is about to overwrite it
  std::size_t transfers = 0;    // of its pages, under way
  int starting = 0;             // threads that start reads into it, perhaps with the lock given up
  std::exception_ptr failure;   // of a read into it
  // By page, what it is at home until its overwriting has succeeded; `clean` where none is under way. Or empty.
  std::vector<Residency> promised;
  DeviceMemory::Event ready;      // of what filled it; null for CPU memory and once past
  DeviceMemory::Event last_used;  // of what used it last
  // Of the queue of victims:
  std::set<Frame*>::node_type place;  // while it is not in the queue: putting it there must not fail
  int cost = -1;                      // transfers that its eviction causes; -1: it is not in the queue
  std::uint64_t next_use = 0;         // as planned, in the plan's time
  std::uint64_t last_use = 0;
};

struct Page {
  Residency state = Residency::zero;
  bool lent = false;          // code on the host has it (pager/lower_pins.h)
  bool is_new = false;        // it belongs to the run's second version, which is open (pager/versions.h)
  bool write_failed = false;  // the latest one home
  Frame* frame = nullptr;
  Backing* home = nullptr;  // of a run on disk: where what lies at home is, or is on its way to
};

struct Run {
  Run() = default;
  ~Run();
  Role role;
  Tier tier;
  std::size_t bytes;
  std::size_t page_bytes;
  std::vector<Page> pages;
  Home* home = nullptr;  // null: its frame
  bool is_on_disk = false;
  std::shared_ptr<Backing> own;  // what is written home goes here; null until there is something to write
  std::vector<std::shared_ptr<Backing>> others;  // in which pages lie that have not been written since
  std::shared_ptr<Backing> next;                 // of a second version, while one is open
  std::thread::id writer;                        // that alone may pin it then
  std::shared_ptr<Frozen> frozen;                // null: no checkpoint needs what its pages hold
  std::unique_ptr<Segment> below;                // in a lower cache
  std::optional<FreeList> slots;                 // of shared runs: what of the page is free
  std::size_t tensors = 0;                       // segments alive in it
  std::uint32_t ordinal = 0;                     // in the plan
  std::uint64_t stream_use = 0;  // the use in which its pages are gone through one by one, counted from the first
  std::uint64_t stream_begin = 0, stream_end = 0;  // of its group, in the plan's time
  std::size_t stream_page = ~std::size_t{0};       // the first of them that has not been taken yet
  std::uint64_t scan = 0;                          // the latest look at what is missing that counted it
  std::size_t transfers = 0;                       // under way, and pages lent; a run that dies lives until they end
  std::size_t lent = 0;                            // pages
  std::uint64_t changes = 0;                       // of its content, as far as pins for writing tell
  bool dead = false;
  bool is_staging = false;     // counts against its budget, and not among homes
  Segment* only = nullptr;     // the tensor that it is made for, if it is not for several; null once that died
  bool listed = false;         // among those that may have room
  Frame* assembled = nullptr;  // the frame in which a thread is bringing it together
  // Of gathered runs:
  bool is_gathered = false, is_packed = false;  // from creation on: read without the lock
  std::vector<Share> shares;
  std::uint64_t number = 0;      // of its first tensor, the same on all ranks
  std::size_t packed_bytes = 0;  // of tensors that share the page: what of it was given out, dead or alive

  bool gathered() const { return is_gathered; }
  bool packed() const { return is_packed; }
  /// Whether its frames can leave memory.
  bool has_home_elsewhere() const { return home != nullptr; }
  bool shares_page() const { return slots || packed(); }

  std::size_t bytes_of(std::size_t page) const { return std::min(page_bytes, bytes - page * page_bytes); }
  const Backing& backing_of(std::size_t page) const { return pages[page].is_new ? *next : *pages[page].home; }
  /// What lies at home of a page is in `backing` from now on. Backings without pages are given up.
  void place(std::size_t page, const std::shared_ptr<Backing>& backing);
  /// Whether a checkpoint needs what is in the page's frame: then nothing may write it.
  bool is_owed(std::size_t page) const { return frozen && frozen->pages[page].place >= Frozen::Place::frame; }
  /// Whether a version is open that is another thread's.
  bool is_closed_to_this_thread() const { return next && writer != std::this_thread::get_id(); }
  Frame* whole_frame() const {
    Frame* frame = pages[0].frame;
    return frame && frame->pages == pages.size() && !frame->assembling ? frame : nullptr;
  }
};

class FrameCache;
class WholePins;

struct SegmentSpec {
  std::size_t bytes;
  std::size_t row_bytes;  // pages are cut on rows where rows and blocks allow it
  Role role;
  Tier tier;
  std::size_t page_bytes = 0;  // 0: the cache's own, on rows
  bool alone = false;          // shares no page, however small
  bool is_staging = false;     // nothing's home: of a cache above, memory for what passes
  SourceRange source = {};     // of tier disk: its content lies here, until it is written. None: zeros
};

/// A tensor that is partitioned over ranks. Each page is every rank's part of it, in rank order.
struct GatheredSpec {
  std::size_t bytes;         // of the tensor
  std::size_t padded_bytes;  // with every rank's last part full
  std::size_t page_bytes;
  Role role;
  Segment* share;        // this rank's parts, one after another; must outlive the segment
  std::uint64_t number;  // the same on all ranks
  bool alone;            // shares no page: it may be created at another time on other ranks
};

/// The storage behind one paged tensor and all its views. Derived classes tell the readers of the bytes where they
/// are.
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

  /// For the cache. Null after release().
  Run* run() const { return run_; }
  std::size_t offset() const { return offset_; }

  /// Operators that write it have been called and have yet to run. The same on all ranks.
  virtual bool will_change() const { return false; }
  /// The same, of operators that will run in the memory below a device's.
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
};

struct PinRequest {
  Segment* segment;
  Access access;
};

}  // namespace zeropage
