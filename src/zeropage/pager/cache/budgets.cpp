#include "zeropage/pager/cache/budgets.h"

#include <fmt/format.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {

void Budgets::refuse(std::size_t bytes, const std::string& more) const {
  throw BudgetError(fmt::format(
      "{} = {} cannot hold the {} that it needs at once{}; raise {}{}",
      gathered_ ? "device_memory's part for gathered tensors" : "device_memory", format_bytes(device_limit_),
      format_bytes(bytes),
      held_bytes_ + homes_in(Tier::device) > 0
          ? fmt::format(" plus the {} that are homes or in use", format_bytes(held_bytes_ + homes_in(Tier::device)))
          : "",
      "device_memory", more));
}

void Budgets::refuse_pages(std::size_t bytes, std::size_t in_use, const std::string& more) const {
  throw BudgetError(fmt::format(
      "device_memory = {} and host_memory = {} cannot hold {} more at once: {} are homes and {} in use; raise {}{}",
      format_bytes(device_limit_), format_bytes(host_limit_), format_bytes(bytes), format_bytes(all_homes()),
      format_bytes(in_use), host_limit_ > 0 ? "host_memory" : "device_memory", more));
}

/// [Note: one memory]
std::size_t Budgets::device_bytes() const {
  const std::size_t total = memory_.budget().used();
  return std::max(std::min(held_bytes_ + homes_in(Tier::device), total),
                  total > host_limit_ ? total - host_limit_ : 0);
}

Budgets::Usage Budgets::usage(Pool pool) const {
  const std::size_t total = memory_.budget().used(), device = device_bytes();
  if (pool == Pool::device) return {"device_memory", device, device_peak_, device_limit_};
  return {"host_memory", total - device, host_peak_, host_limit_};
}

void Budgets::note_usage() {
  const std::size_t total = memory_.budget().used(), device = device_bytes();
  device_peak_ = std::max(device_peak_, device);
  host_peak_ = std::max(host_peak_, total - device);
}

}  // namespace zeropage
