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

#include "zeropage/page/kinds.h"

namespace zeropage {

/// The subject of a collective, for errors and for the check that ranks are together.
struct Subject {
  std::string_view role;
  std::uint64_t number = 0;  // of the tensor or run, counted by creation: the same on all ranks
  std::size_t page = 0;
  std::uint64_t writes =
      0;  // of a gather: how often the program has written the tensor, or those that share its page
};

/// The ranks of a gather.
enum class Among : std::uint8_t {
  all,   // the group's
  node,  // those of this rank's node: consecutive ranks that share fast links, equally many on each node
};

/// How a gather sends its parts.
struct Sending {
  Among among = Among::all;
  Coding coding = Coding::none;  // of a gather among all
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
  /// The number of ranks of each node. Unless a group knows of nodes, all its ranks are one.
  virtual int node_size() const { return size(); }
  int size_among(Among among) const { return among == Among::all ? size() : node_size(); }
  int rank_among(Among among) const { return rank() % size_among(among); }

  /// Whether gathers have a connection of their own, so that gathers ahead hold up nothing else.
  virtual bool gathers_apart() const { return false; }
  /// Starts to gather `part_bytes` of every rank among `among`, in rank order, into size_among() * part_bytes at
  /// `into`, which may contain `part` already. Both must stay until the work was waited for. All ranks of the group
  /// make the same call, even if each node gathers apart. With a coding, `into` must not contain `part`, every rank's
  /// values are rounded, this one's too, and a null `part` makes all ranks throw when they wait. Throws RankError.
  [[nodiscard]] virtual std::unique_ptr<Work> all_gather(std::byte* into, const std::byte* part,
                                                         std::size_t part_bytes, const Subject& subject,
                                                         Sending sending) = 0;
  /// Records that this rank cannot do its part of the next collective. All ranks throw RankError when they next
  /// compare hashes.
  virtual void fail(std::string_view why) { (void)why; }
  /// Scratch memory that collectives can use.
  virtual std::shared_ptr<std::byte> scratch(std::size_t bytes) = 0;
};

}  // namespace zeropage
