// The interface between the pager and a group of ranks. The pager only needs to gather all ranks' parts. Free of
// torch: collectives.h implements it, and in tests ranks are threads.
//
// Contract: every rank makes the same calls in the same order. The calls follow from operators on paged tensors and
// from sizes, never from timing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace zeropage {

/// The subject of a collective, for errors and for the check that ranks are together.
struct Subject {
  std::string_view role;
  std::uint64_t number = 0;  // of the tensor or run, counted by creation: the same on all ranks
  std::size_t page = 0;
};

class Ranks {
 public:
  /// A collective in flight.
  class Work {
   public:
    virtual ~Work() = default;
    /// Returns when this thread's next requests may use the result. Throws RankError.
    virtual void wait() = 0;
  };

  virtual ~Ranks() = default;
  virtual int size() const = 0;
  virtual int rank() const = 0;

  /// Whether gathers have a connection of their own, so that gathers ahead hold up nothing else.
  virtual bool gathers_apart() const { return false; }
  /// Starts to gather every rank's `part_bytes`, in rank order, into size() * part_bytes at `into`, which may contain
  /// `part` already. Both must stay until the work was waited for. Throws RankError.
  [[nodiscard]] virtual std::unique_ptr<Work> all_gather(std::byte* into, const std::byte* part,
                                                         std::size_t part_bytes, const Subject& subject) = 0;
  /// Records that this rank cannot do its part of the next collective. All ranks throw RankError when they next
  /// compare hashes.
  virtual void fail(std::string_view why) { (void)why; }
  /// Scratch memory that collectives can use.
  virtual std::shared_ptr<std::byte> scratch(std::size_t bytes) = 0;
};

}  // namespace zeropage
