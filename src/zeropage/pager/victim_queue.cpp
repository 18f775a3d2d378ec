#include "zeropage/pager/victim_queue.h"

#include <vector>

namespace zeropage {

void VictimQueue::insert(Frame& frame, AccessPlan::Time next_use, int cost) {
  remove(frame);
  frame.next_use = next_use;
  frame.cost = cost;
  frames_[cost].insert(&frame);
  bytes_[cost] += frame.memory.bytes();
}

void VictimQueue::remove(Frame& frame) {
  if (frame.cost < 0) return;
  frames_[frame.cost].erase(&frame);
  bytes_[frame.cost] -= frame.memory.bytes();
  frame.cost = -1;
}

Frame* VictimQueue::best(AccessPlan::Time now, AccessPlan::Time after) const {
  Frame* best = nullptr;
  double best_worth = -1;
  for (int cost = 0; cost < 3; ++cost) {
    if (frames_[cost].empty()) continue;
    Frame* frame = *frames_[cost].begin();
    if (frame->next_use <= after) continue;
    // How long it would stay for one transfer spared. What has no planned use goes first, the least recently used of
    // them.
    const auto distance = static_cast<double>(frame->next_use > now ? frame->next_use - now : 1);
    const double worth = is_planned(frame->next_use) ? (cost == 0 ? 1e18 : distance / cost) : distance;
    if (worth > best_worth) best = frame, best_worth = worth;
  }
  return best;
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
