#include "zeropage/pager/eviction.h"

namespace zeropage {
namespace {

class LeastRecentlyUsed final : public EvictionPolicy {
 public:
  void add(Frame& frame) override {
    auto& list = list_of(frame.pool);
    frame.position = list.insert(list.end(), &frame);
    frame.last_use = ++clock_;
  }

  void remove(Frame& frame) override { list_of(frame.pool).erase(frame.position); }

  void use(Frame& frame) override {
    auto& list = list_of(frame.pool);
    list.splice(list.end(), list, frame.position);
    frame.last_use = ++clock_;
  }

  void retire(Frame& frame) override {
    auto& list = list_of(frame.pool);
    list.splice(list.begin(), list, frame.position);
    frame.last_use = 0;
  }

  Frame* victim(Pool pool) override {
    for (Frame* frame : list_of(pool)) {
      if (frame->pins == 0 && !frame->permanent) return frame;
    }
    return nullptr;
  }

  void from_coldest(Pool pool, const std::function<bool(Frame&)>& visit) override {
    for (Frame* frame : list_of(pool)) {
      if (!visit(*frame)) return;
    }
  }

 private:
  std::list<Frame*>& list_of(Pool pool) { return lists_[static_cast<int>(pool)]; }

  std::list<Frame*> lists_[2];  // coldest first
  std::uint64_t clock_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_least_recently_used() { return std::make_unique<LeastRecentlyUsed>(); }

}  // namespace zeropage
