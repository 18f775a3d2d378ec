// Between a pager of device memory and the pager of the host below it: pages of the one are read from, and written
// to, pages of the other. To the upper pager this is what a disk is to the lower one: it hands out tickets.
//
// Called under the upper pager's lock.
#pragma once

#include <deque>
#include <memory>

#include "zeropage/io/io.h"
#include "zeropage/page/page.h"
#include "zeropage/store/device_memory.h"

namespace zeropage {

class Uploads final : public TicketIssuer {
 public:
  Uploads(Pager& host, DeviceMemory& device);
  ~Uploads() override;

  /// Starts bringing a page into host memory; waiting for the ticket uploads it, ordered before what the waiting
  /// thread asks of the device next. Throws BudgetError, DiskError.
  [[nodiscard]] Ticket read(Segment& below, std::size_t page, std::byte* into, std::size_t bytes);
  /// Starts a download of a page that was last used at `after`. Throws BudgetError, DiskError.
  [[nodiscard]] Ticket write(Segment& below, std::size_t page, const std::byte* from, std::size_t bytes,
                             const DeviceMemory::Mark& after);
  /// Returns when no upload from `below` is under way any more: before its pages die.
  void finish(const Segment& below);

 protected:
  void wait(Ticket::State& state) override;
  bool done(const Ticket::State& state) override;

 private:
  struct Passage;
  struct Landing;
  std::shared_ptr<Passage> pin(Segment& below, std::size_t page, Access access, std::byte* buffer, std::size_t bytes);
  void upload(Passage& passage);
  void let_go_of_landed();
  bool let_go_of_oldest();
  void land(Passage& passage);

  Pager& host_;
  DeviceMemory& device_;
  // Oldest first; those whose ticket was waited for are over:
  std::deque<std::weak_ptr<Passage>> asked_for_;  // reads whose upload has not been started
  std::deque<std::weak_ptr<Passage>> leaving_;    // downloads
  std::deque<Landing> in_flight_;                 // uploads, which need their host pages until they are done
};

}  // namespace zeropage
