#include "zeropage/page/page.h"

#include <array>
#include <utility>

namespace zeropage {

Run::~Run() = default;

void Run::place(std::size_t page, const std::shared_ptr<Backing>& backing) {
  Backing* const before = std::exchange(pages[page].home, backing.get());
  if (before == backing.get()) return;
  if (backing && backing->pages++ == 0 && backing != own) others.push_back(backing);
  if (before && --before->pages == 0) std::erase_if(others, [&](const auto& other) { return other.get() == before; });
}

std::string_view name_of(Role role) {
  return std::array<std::string_view, kRoles>{"parameter", "gradient", "optimizer",
                                              "activation"}[static_cast<int>(role)];
}

std::string_view name_of(Tier tier) {
  return std::array<std::string_view, kTiers>{"device", "host", "disk"}[static_cast<int>(tier)];
}

}  // namespace zeropage
