#include "zeropage/pager/foresight/timeline.h"

#include <algorithm>

namespace zeropage {

bool Timeline::record_use(std::span<const PinRequest> requests, bool whole, double seconds) {
  const std::uint64_t surprises = plan_.surprises(), uses = plan_.uses();
  bool begins = true;
  for (const PinRequest& request : requests) {
    const Run& run = *request.segment->run();
    if (!run.home) continue;
    plan_.use({run.ordinal, request.access, whole, begins}, run.bytes, seconds);
    begins = whole;
    if (!whole) request.segment->run()->stream_use = plan_.uses(), request.segment->run()->stream_page = 0;
  }
  for (const PinRequest& request : requests) {
    if (whole) break;
    request.segment->run()->stream_begin = plan_.latest_group_began();
    request.segment->run()->stream_end = plan_.now();
  }
  if (plan_.uses() != uses) seconds_ = seconds;
  now_ = whole ? plan_.now() : plan_.latest_group_began();
  return plan_.surprises() != surprises;
}

}  // namespace zeropage
