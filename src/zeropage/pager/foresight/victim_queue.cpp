#include "zeropage/pager/foresight/victim_queue.h"

#include <vector>

namespace zeropage {

void VictimQueue::insert(Frame& frame, AccessPlan::Time next_use, int cost) noexcept {
  remove(frame);
  frame.next_use = next_use;
  frame.cost = cost;
  frames_[cost].insert(std::move(frame.place));
  bytes_[cost] += frame.memory.bytes();
}

void VictimQueue::remove(Frame& frame) noexcept {
  if (frame.cost < 0) return;
  frame.place = frames_[frame.cost].extract(&frame);
  bytes_[frame.cost] -= frame.memory.bytes();
  frame.cost = -1;
}

Frame* VictimQueue::best(AccessPlan::Time now, AccessPlan::Time after) const {
  Frame* best = nullptr;
  double best_worth = -1;
  for (int cost = 0; cost < 3; ++cost) {
    if (frames_[cost].empty()) continue;
    Frame* frame = *frames_[cost].begin();
    if (after > 0 && frame->next_use <= after) continue;
    const double worth = worth_of_leaving(*frame, now);
    if (worth > best_worth) best = frame, best_worth = worth;
  }
  return best;
}

/// The time the frame would stay per transfer that evicting it causes. Frames without a planned use go first, the
/// least recently used first.
double VictimQueue::worth_of_leaving(const Frame& frame, AccessPlan::Time now) {
  const auto distance = static_cast<double>(frame.next_use > now ? frame.next_use - now : 1);
  if (!is_planned(frame.next_use)) return distance;
  return frame.cost == 0 ? 1e18 : distance / frame.cost;
}

std::size_t VictimQueue::bytes_before(const Frame& frame, AccessPlan::Time now, std::size_t enough,
                                      const std::function<bool(const Frame&)>& counts) const {
  const double worth = worth_of_leaving(frame, now);
  std::size_t bytes = 0, looked_at = 0;
  constexpr std::size_t kFew = 16;
  for (int cost = 0; cost < frame.cost; ++cost) {
    for (const Frame* other : frames_[cost]) {
      if (bytes >= enough || worth_of_leaving(*other, now) <= worth) break;
      if (++looked_at > kFew) return enough;
      if (counts(*other)) bytes += other->memory.bytes();
    }
  }
  return bytes;
}

Frame* VictimQueue::best_clean(const std::function<bool(const Frame&)>& clean) const {
  Frame* best = nullptr;
  for (int cost = 0; cost < 2; ++cost) {
    for (Frame* frame : frames_[cost]) {
      if (!clean(*frame)) continue;
      if (cost == 0) return frame;
      if (!best || frame->next_use > best->next_use) best = frame;
      break;
    }
  }
  return best;
}

void VictimQueue::for_each(const std::function<void(Frame&)>& visit) const {
  std::vector<Frame*> all;
  for (const auto& frames : frames_) all.insert(all.end(), frames.begin(), frames.end());
  for (Frame* frame : all) visit(*frame);
}

}  // namespace zeropage
