// The home of gathered pages: every rank's shares. To read a page, all ranks all-gather their parts of it. To write a
// page, each rank keeps its own part.
//
// Collectives start in the order of the reads, which follows the plan as counted in pins, whatever the disk does. If
// gathers have a connection of their own, a read starts its gather at once, and first waits for this rank's part.
// Otherwise all start when an operator first needs one of them: they would hold up the words that ranks exchange.
//
// A page of a large tensor is gathered straight into its frame. Small tensors share a page and one all-gather: their
// parts are packed, gathered and unpacked.
//
// [Note: secondary partition] A run may have a second share, of the ranks of each node. A gather over all ranks fills
// it. The next gathers of the page stay inside the node, until the content changes.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "zeropage/pager/frame_cache.h"

namespace zeropage {

/// The present shares of a run. Other threads may add tensors to the run meanwhile. A tensor that dies waits until
/// its share is no longer used here.
class SharesInUse {
 public:
  SharesInUse(Monitor& monitor, const Run& run);
  ~SharesInUse();
  SharesInUse(const SharesInUse&) = delete;
  SharesInUse& operator=(const SharesInUse&) = delete;
  auto begin() const { return shares_.begin(); }
  auto end() const { return shares_.end(); }
  std::size_t packed_bytes() const { return packed_bytes_; }

 private:
  Monitor& monitor_;  // of the gathered cache
  const Run& run_;
  std::vector<Share> shares_;
  std::size_t packed_bytes_;
};

class ShardedHome final : public Home {
 public:
  /// `gathered` is the lock of the cache whose home this is, and `memory` the memory of that cache's frames.
  ShardedHome(Monitor& gathered, FrameCache& local, std::shared_ptr<Ranks> ranks, const FrameMemory& memory);
  ~ShardedHome() override;

  /// Reads this rank's part of the page into memory. hurry() gathers the page, after all earlier reads.
  std::optional<Outcome> read(const Run& run, std::size_t page, std::byte* into, Priority priority,
                              Done done) override;
  std::optional<Outcome> write(const Run& run, std::size_t page, const std::byte* from,
                               const DeviceMemory::Event& after, Priority priority, Done done) override;
  void hurry(const Run& run, std::size_t page, std::span<std::byte> frame) override;

 private:
  struct Gather;
  void choose_ranks(Gather& gather);
  void hold_part(Gather& gather, Segment* share);
  void hold_secondary_part(Gather& gather);
  void launch_all();
  void launch(Gather& gather);
  void launch_packed(Gather& gather);
  void pack(Gather& gather);
  void send_mark(Gather& gather, std::size_t bytes);
  void check_parts(const Gather& gather) const;
  void deal_out(Gather& gather);
  void keep_secondary_part(Gather& gather);
  std::shared_ptr<Segment> secondary_share_of(const Run& run);
  void release_part(Gather& gather);
  PagePin pin_part(Segment& share, std::size_t page, Access access = Access::read);
  void complete(Gather& gather);

  Monitor& gathered_;
  FrameCache& local_;
  std::shared_ptr<Ranks> ranks_;
  const FrameMemory& memory_;
  std::recursive_mutex mutex_;                     // serialises the collectives of this process
  std::deque<std::shared_ptr<Gather>> asked_for_;  // oldest first, not launched
  std::deque<std::shared_ptr<Gather>> in_flight_;  // oldest first
  bool launching_ = false;
};

}  // namespace zeropage
