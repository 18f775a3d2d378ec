// Predicts the next uses. It keeps the history of uses of one cache's runs, and finds the place in it where the same
// uses came before. The plan is what followed there. It has no notion of an iteration: forward, backward,
// recomputation, accumulation, the optimizer's step and evaluation are found where they repeat. A wrong guess costs
// time, never bits.
//
// An ordinal stands for a run. A run that each period creates anew, such as a gradient, takes the ordinal of the dead
// one that was created at the same place before.
//
// Time is counted in bytes of uses, so a distance is the memory that passes until then.
//
// O(log of the history) a use and a question, O(1) memory. Not thread-safe: the cache's lock guards it.
//
// [Note: bounded history] The history is a ring: each use beyond its size replaces the oldest one. A position counts
// uses from the program's start, and a slot is its place in the ring. Links between uses are slots. The ring keeps a
// few uses longer than the history, because the hash of the oldest context needs them. A link to a use that the
// history has forgotten leads out of it, or to a newer use: either ends a chain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "zeropage/page/page.h"

namespace zeropage {

class AccessPlan {
 public:
  using Ordinal = std::uint32_t;
  using Time = std::uint64_t;
  static constexpr Time kNever = std::numeric_limits<Time>::max();

  struct Use {
    Ordinal ordinal;
    Access access;
    bool whole;         // in one frame; else page by page
    bool begins;        // false: its pages take turns with those of the previous use
    bool last = false;  // it died after this use
  };
  struct Coming {
    Use use;
    Time time;
    double seconds;  // after the latest use began, in a program that never waits for transfers
  };

  /// Returns the ordinal of a new run. Runs of different `kind`, such as role and size, cannot stand for each other.
  /// `take_over`: it may take the ordinal of a dead run.
  Ordinal create(std::uint64_t kind, bool take_over = true);
  void destroy(Ordinal ordinal) noexcept;
  /// One ordinal for all runs of a kind that have no plan of their own. It is never destroyed.
  Ordinal shared(std::uint64_t kind);

  /// Records a use; a repeat with no other use in between counts as one. `seconds`: when it begins, on any clock.
  void use(const Use& use, std::size_t bytes, double seconds = 0);

  /// The time at which all uses so far are over.
  Time now() const { return now_; }
  /// The number of uses so far; their number before the latest one that began a group; and the time that one began.
  std::uint64_t uses() const { return uses_; }
  std::uint64_t latest_group() const { return latest_group_; }
  Time latest_group_began() const { return latest_group_began_; }
  /// The time and kind of the ordinal's next use. Time kNever: unknown to the plan. A death counts as an overwrite:
  /// nothing reads the content.
  struct NextUse {
    Time begin = kNever, end = kNever;  // of the group in which it is
    Access access = Access::read;
  };
  NextUse next_use(Ordinal ordinal) const;
  /// The time at which a group that streams its members' pages from `begin` to `end` reaches one of them.
  static Time time_of_page(Time begin, Time end, std::size_t page, std::size_t pages) {
    return begin + static_cast<Time>(static_cast<double>(end - begin) * static_cast<double>(page) / pages);
  }
  /// The k-th use from now on: 0 is the next, -1 the latest. None if the latest uses never came in this order before.
  std::optional<Coming> coming(std::int64_t k) const;
  bool knows() const { return match_ != kNowhere && confident_; }
  /// The number of uses that were not as planned.
  std::uint64_t surprises() const { return surprises_; }

 private:
  using Position = std::uint64_t;  // of a use: its number
  using Slot = std::uint32_t;
  static constexpr Position kNowhere = ~Position{0};
  static constexpr Slot kNone = ~Slot{0};
  static constexpr std::size_t kRing = std::size_t{1} << 18, kBlock = 512, kBuckets = std::size_t{1} << 16;  // uses
  // Numbers of equal uses that identify a place. After a match of one use, the next use must confirm it.
  static constexpr std::size_t kContexts[] = {4, 2, 1};
  static constexpr std::size_t kLongestContext = 4;
  static constexpr std::size_t kMostUses = kRing - kLongestContext;
  static constexpr std::size_t kMostCandidates = 32;  // places compared if several match
  static constexpr std::size_t kMakings = 64;         // future uses searched for a run that is created anew

  struct Entry {
    Use use;
    Time time;              // when it began
    double seconds;         // likewise, on a clock
    Time died;              // if it was the run's last: when the run died
    std::uint64_t hash;     // of the history up to and with it
    Slot before[3];         // earlier ends of the same context, by context
    std::uint32_t next[3];  // the bucket's next context, by context: see find_context()
  };
  struct Known {
    std::uint64_t kind;
    bool alive;
    std::uint32_t forgotten = 0;    // of the places
    std::vector<Slot> places = {};  // in the history, in order
    std::list<Ordinal>::iterator node;
  };
  /// An ordinal is always in one list, so that a death allocates nothing.
  using Ordinals = std::list<Ordinal>;
  struct Kind {
    std::size_t ordinals = 0;  // alive or spare
    Ordinals spare = {};       // dead, the oldest first
  };

  Entry& at(Position position) { return blocks_[position % kRing / kBlock][position % kBlock]; }
  const Entry& at(Position position) const { return blocks_[position % kRing / kBlock][position % kBlock]; }
  static Slot slot_of(Position position) { return static_cast<Slot>(position % kRing); }
  Position position_of(Slot slot) const { return end_ - 1 - (end_ - 1 - slot) % kRing; }
  std::size_t size() const { return end_ - oldest_; }
  std::uint64_t power(std::size_t exponent) const;
  std::uint64_t hash_of(Position end, std::size_t length) const;
  std::size_t common_length(Position a, Position b) const;
  Position find_place();
  std::optional<Coming> likely(std::size_t k) const;
  std::uint32_t& find_context(std::size_t context, std::uint64_t hash);
  void index_latest();
  void forget_oldest();
  Ordinal revive(Ordinal ordinal) noexcept;
  void free(Ordinal ordinal, Ordinals& from) noexcept;

  std::vector<std::unique_ptr<Entry[]>> blocks_;  // of the ring
  Position oldest_ = kLongestContext, end_ = kLongestContext;
  std::vector<std::uint32_t> buckets_;                 // The latest end of each context, by hash.
  std::deque<Slot> groups_;                            // Uses that begin a group, in order.
  std::vector<Known> known_;                           // By ordinal.
  std::unordered_map<std::uint64_t, Kind> kinds_;      // that have an ordinal
  Ordinals alive_, free_;                              // free: dead and forgotten
  std::unordered_map<std::uint64_t, Ordinal> shared_;  // by kind
  Position match_ = kNowhere;                          // the earlier use that matches the latest one
  bool confident_ = false;
  Time now_ = 0;
  std::uint64_t uses_ = 0, latest_group_ = 0;
  Time latest_group_began_ = 0;
  std::uint64_t surprises_ = 0;
};

}  // namespace zeropage
