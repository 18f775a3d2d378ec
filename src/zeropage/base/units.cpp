#include "zeropage/base/units.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

#include "zeropage/base/errors.h"

namespace zeropage {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr std::array<Unit, 13> kUnits{{{"", 1},
                                       {"b", 1},
                                       {"k", 1e3},
                                       {"kb", 1e3},
                                       {"kib", 1024.0},
                                       {"m", 1e6},
                                       {"mb", 1e6},
                                       {"mib", 1048576.0},
                                       {"g", 1e9},
                                       {"gb", 1e9},
                                       {"gib", 1073741824.0},
                                       {"tb", 1e12},
                                       {"tib", 1099511627776.0}}};

}  // namespace

std::size_t parse_bytes(std::string_view text, std::string_view setting) {
  double value = 0;
  auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string suffix;
  for (char c : std::string_view(end, text.data() + text.size() - end)) {
    if (c != ' ') suffix += static_cast<char>(std::tolower(c));
  }
  if (status == std::errc{} && value >= 0 && std::isfinite(value)) {
    for (const Unit& unit : kUnits) {
      if (unit.name == suffix && value * unit.bytes < 9e18) return static_cast<std::size_t>(value * unit.bytes);
    }
  }
  throw ConfigError(
      fmt::format("{} = \"{}\" is not a size; write it as bytes or like \"256MB\" or \"4GiB\"", setting, text));
}

std::string format_bytes(std::size_t bytes) {
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  for (const char* unit : {"kB", "MB", "GB"}) {
    value /= 1000;
    if (value < 999.95) return fmt::format("{:.1f} {}", value, unit);
  }
  return fmt::format("{:.1f} TB", value / 1000);
}

}  // namespace zeropage
