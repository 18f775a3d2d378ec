// Second versions of segments. While one is open, operators' writes go to new places on disk, and the earlier content
// stays valid until the version is committed. An update can thus run before it is known whether it is wanted
// (rules/speculation.h). Memory holds only one content: once a page was written, the new one. The caller makes sure
// that nothing else pins the segment while its version is open.
//
// Contract: each call takes the cache's lock, and gives it up while it waits.
#pragma once

#include <span>

#include "zeropage/pager/cache/transfers.h"
#include "zeropage/store/swap_file.h"

namespace zeropage {

class Versions {
 public:
  /// `swap` is null if there is no disk.
  Versions(Monitor& monitor, Frames& frames, Transfers& transfers, SwapFile* swap)
      : monitor_(monitor), frames_(frames), transfers_(transfers), swap_(swap) {}

  // See FrameCache.
  bool open(Segment& segment, bool write_first);
  bool commit(std::span<Segment* const> segments);
  void discard(Segment& segment);
  void write_behind(Segment& segment);

 private:
  using Lock = Monitor::Lock;

  void write_home(Lock& lock, Run& run);
  void write_behind(Lock& lock, Run& run, Priority priority);

  Monitor& monitor_;
  Frames& frames_;
  Transfers& transfers_;
  SwapFile* const swap_;
};

}  // namespace zeropage
