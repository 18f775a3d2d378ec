// A segment of a lower cache, as the cache above holds it. Operators know nothing of it.
#pragma once

#include "zeropage/pager/frame_cache.h"

namespace zeropage {

class LowerSegment final : public Segment {
 public:
  ~LowerSegment() override {
    if (cache()) cache()->release(*this);
  }

 protected:
  void expose(std::byte*) override {}
  void hide() override {}
};

}  // namespace zeropage
