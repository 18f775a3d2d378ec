// The seam between the pager and a group of ranks: all the pager asks of them is to make a whole of everyone's parts.
// Without torch; collectives.h stands behind it, and in tests ranks are threads.
//
// Contract: every rank calls the same things in the same order. What is called follows from the operators that meet
// paged tensors and from sizes, never from timing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace zeropage {

/// What a collective is about, for the check that ranks are together and for errors.
struct Subject {
  std::string_view role;
  std::uint64_t number = 0;  // of the tensor or run, counted from creation: the same on all ranks
  std::size_t page = 0;
};

class Ranks {
 public:
  /// A collective under way.
  class Work {
   public:
    virtual ~Work() = default;
    /// Returns when its result may be used by what this thread asks for next. Throws RankError.
    virtual void wait() = 0;
  };

  virtual ~Ranks() = default;
  virtual int size() const = 0;
  virtual int rank() const = 0;

  /// Starts bringing every rank's `part_bytes` together, in rank order, into size() * part_bytes at `into`. The part
  /// may lie there already. Both must stay until the work was waited for. Throws RankError.
  [[nodiscard]] virtual std::unique_ptr<Work> all_gather(std::byte* into, const std::byte* part,
                                                         std::size_t part_bytes, const Subject& subject) = 0;
  /// This rank cannot do its part of what comes next: all ranks throw RankError where they next compare what they
  /// did.
  virtual void fail(std::string_view why) { (void)why; }
  /// Scratch memory where collectives can reach it.
  virtual std::shared_ptr<std::byte> scratch(std::size_t bytes) = 0;
};

}  // namespace zeropage
