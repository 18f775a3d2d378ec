// Pins of whole segments: what every operator on the general path does first and last.
//
// Contract: pin() brings all segments in, each run in one frame, or throws and has changed no page's content. A run
// that is in memory page by page is copied together; what is missing is read straight into the new frame. Pages
// change their frame only when all that can fail is done.
#pragma once

#include <span>
#include <vector>

#include "zeropage/pager/cache/gate.h"
#include "zeropage/pager/cache/grants.h"
#include "zeropage/pager/foresight/read_ahead.h"

namespace zeropage {

/// How long pins last, and what their thread pins besides.
struct PinOptions {
  bool lasting = false;   // the thread does other things meanwhile, such as in zeropage.pinned()
  std::size_t extra = 0;  // bytes that it will pin page by page in addition, kept until it unpins
};

class WholePins {
 public:
  WholePins(Monitor& monitor, FrameMemory& memory, Budgets& budgets, Timeline& timeline, Frames& frames,
            Transfers& transfers, Grants& grants, Room& room, ReadAhead& ahead)
      : monitor_(monitor),
        memory_(memory),
        budgets_(budgets),
        timeline_(timeline),
        frames_(frames),
        transfers_(transfers),
        grants_(grants),
        room_(room),
        ahead_(ahead) {}

  // As FrameCache says of them.
  std::size_t pin(std::span<const PinRequest> requests, const PinOptions& options);
  void unpin(std::span<const PinRequest> requests, const PinOptions& options, std::uint64_t thread,
             bool failed) noexcept;
  void write_again(Segment& segment);
  /// Runs that pins met with no frame.
  std::size_t faults() const { return faults_; }

 private:
  using Lock = Monitor::Lock;
  struct Hold;

  bool is_resident(std::span<const PinRequest> requests) const;
  Grants::Need need_of(std::span<const PinRequest> requests, std::size_t extra) const;
  std::vector<Hold> holds_for(std::span<const PinRequest> requests) const;
  void hold(Lock& lock, std::vector<Hold>& holds);
  void take_frame(Lock& lock, Hold& hold);
  void wait_for_content(Lock& lock, std::vector<Hold>& holds);
  void fill(Lock& lock, std::vector<Hold>& holds);
  void expose(std::span<const PinRequest> requests, const PinOptions& options, std::vector<Hold>& holds);
  void make_writable(Lock& lock, Run& run);
  void commit(Hold& hold) noexcept;
  void let_go(std::vector<Hold>& holds) noexcept;

  Monitor& monitor_;
  FrameMemory& memory_;
  Budgets& budgets_;
  Timeline& timeline_;
  Frames& frames_;
  Transfers& transfers_;
  Grants& grants_;
  Room& room_;
  ReadAhead& ahead_;
  std::size_t faults_ = 0;
};

}  // namespace zeropage
