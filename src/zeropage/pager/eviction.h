// The seam behind which a victim is chosen. Foresight will put Belady's rule here; until then, least recently used.
#pragma once

#include <functional>
#include <memory>

#include "zeropage/page/page.h"

namespace zeropage {

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  virtual void add(Frame& frame) = 0;  // frame.pool says to which list
  virtual void remove(Frame& frame) = 0;
  virtual void retire(Frame& frame) = 0;  // will not be used for long: the first to lose
  virtual void use(Frame& frame) = 0;     // sets frame.last_use; larger is more worth keeping

  /// The frame of `pool` to lose first that is neither pinned nor permanent; null if there is none.
  virtual Frame* victim(Pool pool) = 0;

  /// Calls `visit` for frames of `pool` from the first to lose, until it returns false.
  virtual void from_coldest(Pool pool, const std::function<bool(Frame&)>& visit) = 0;
};

std::unique_ptr<EvictionPolicy> make_least_recently_used();

}  // namespace zeropage
