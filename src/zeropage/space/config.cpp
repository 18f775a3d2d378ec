#include "zeropage/space/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/space/settings_table.h"

namespace zeropage {

void Config::set(std::string_view name, std::string value) {
  const auto setting = std::ranges::find(kSettings, name, &Setting::name);
  if (setting == kSettings.end()) {
    std::vector<std::string_view> known;
    for (const Setting& each : kSettings) known.push_back(each.name);
    throw ConfigError(fmt::format("\"{}\" is not a setting; the settings are {}", name, fmt::join(known, ", ")));
  }
  this->*setting->value = std::move(value);
}

std::vector<std::pair<std::string, std::string>> Config::items() const {
  std::vector<std::pair<std::string, std::string>> items;
  for (const Setting& setting : kSettings) items.emplace_back(setting.name, this->*setting.value);
  return items;
}

}  // namespace zeropage
