#include "zeropage/page/page.h"

#include <array>

namespace zeropage {

Run::~Run() = default;

std::string_view name_of(Role role) {
  return std::array<std::string_view, kRoles>{"parameter", "gradient", "optimizer",
                                              "activation"}[static_cast<int>(role)];
}

std::string_view name_of(Tier tier) {
  return std::array<std::string_view, kTiers>{"device", "host", "disk"}[static_cast<int>(tier)];
}

}  // namespace zeropage
