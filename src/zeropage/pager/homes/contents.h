// Changes to a whole segment other than by operators: zeroing it, making a file's bytes its content, evicting it, and
// updating a gathered tensor's share.
//
// Contract: each call takes the cache's lock, and gives it up while it waits. Pinned frames stay.
#pragma once

#include <functional>
#include <span>
#include <string_view>

#include "zeropage/pager/cache/page_pins.h"

namespace zeropage {

class Contents {
 public:
  Contents(Monitor& monitor, FrameMemory& memory, Frames& frames, Transfers& transfers, Room& room,
           PagePins& page_pins)
      : monitor_(monitor),
        memory_(memory),
        frames_(frames),
        transfers_(transfers),
        room_(room),
        page_pins_(page_pins) {}

  // See FrameCache.
  void zero(Segment& segment);
  bool map(Segment& segment, std::span<const SlotRef> slots);
  void evict(Segment& segment);
  void store(Segment& segment);
  void share_changes(Segment& segment);
  void gather_exactly(Segment& segment);

 private:
  using Lock = Monitor::Lock;

  void settle_transfers(Lock& lock, Run& run);
  void drop_frames(Lock& lock, Run& run, std::string_view what);
  bool change_below(Lock& lock, Run& run, const std::function<bool()>& change);

  Monitor& monitor_;
  FrameMemory& memory_;
  Frames& frames_;
  Transfers& transfers_;
  Room& room_;
  PagePins& page_pins_;
};

}  // namespace zeropage
