// Between a pager of gathered tensors and the pager of this rank's shares below it: a page is read by gathering every
// rank's part of it, and written by keeping this rank's part. To the upper pager this is what a disk is to the lower
// one: it hands out tickets.
//
// Collectives start in the order of the reads, which is the order of the faults, whatever the disk does. A page of a
// large tensor is gathered straight into its frame. Small tensors share a page and travel together: their parts are
// packed, gathered at once, and dealt out.
//
// Called under the upper pager's lock.
#pragma once

#include <deque>
#include <memory>

#include "zeropage/comm/ranks.h"
#include "zeropage/io/io.h"
#include "zeropage/page/page.h"
#include "zeropage/store/device_memory.h"

namespace zeropage {

class Gathers final : public TicketIssuer {
 public:
  /// `device` is null if operators run on the CPU.
  Gathers(Pager& local, std::shared_ptr<Ranks> ranks, DeviceMemory* device);
  ~Gathers() override;

  int ranks() const { return ranks_->size(); }
  /// Starts bringing this rank's part of a page into memory; waiting for the ticket gathers it. Throws BudgetError,
  /// DiskError, RankError.
  [[nodiscard]] Ticket read(const Run& run, std::size_t page, std::byte* into);
  /// Copies this rank's part of a page home. Throws BudgetError, DiskError.
  void write(const Run& run, std::size_t page, const std::byte* from);

 protected:
  void wait(Ticket::State& state) override;
  bool done(const Ticket::State& state) override;

 private:
  struct Gathering;
  void hold_part(Gathering& gathering);
  void launch_all();
  void launch(Gathering& gathering);
  void pack(Gathering& gathering);
  void deal_out(Gathering& gathering);
  bool finish_oldest();
  void finish(Gathering& gathering);
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);

  Pager& local_;
  std::shared_ptr<Ranks> ranks_;
  DeviceMemory* device_;
  std::deque<std::weak_ptr<Gathering>> asked_for_;  // oldest first, not launched
  std::deque<std::weak_ptr<Gathering>> in_flight_;  // oldest first
};

}  // namespace zeropage
