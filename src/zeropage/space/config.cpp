#include "zeropage/space/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "zeropage/base/errors.h"
#include "zeropage/base/json.h"
#include "zeropage/space/settings_table.h"

namespace zeropage {
namespace {

std::string content_of_file(const std::string& path) {
  const bool is_directory = std::filesystem::is_directory(path);
  std::ifstream file(path);
  if (file && !is_directory) return {std::istreambuf_iterator<char>(file), {}};
  throw ConfigError(
      fmt::format("config '{}' cannot be read: {}", path, std::strerror(is_directory ? EISDIR : errno)));
}

/// Several disks, as one text.
std::string disks_of(const Json::Array& disks) {
  std::string text;
  for (const Json& disk : disks) {
    const bool is_alone = disks.size() == 1 && std::filesystem::is_directory(disk.text());
    if (disk.text().empty() || (!is_alone && disk.text().find(':') != std::string::npos)) {
      throw ConfigError("each item must be one directory, and no name of several may contain ':'");
    }
    text += (text.empty() ? "" : ":") + disk.text();
  }
  return text;
}

/// The value as a user writes it for Config.
std::string text_of(std::string_view name, const Json& value) {
  if (value.is_text()) return value.text();
  if (value.is_null()) return "None";
  if (value.is_array() && name == "disk_path" && !value.array().empty()) return disks_of(value.array());
  if (value.is_array() || value.is_object()) throw ConfigError("a setting is text, a number, true or false");
  return value.dump();
}

}  // namespace

Config Config::from_file(const std::string& path) {
  const std::string text = content_of_file(path);
  Config config;
  Json settings;
  try {
    settings = Json::parse(text);
  } catch (const JsonError& error) {
    throw ConfigError(fmt::format("config '{}' is not JSON: {}", path, error.what()));
  }
  if (!settings.is_object())
    throw ConfigError(fmt::format("config '{}' must hold one JSON object of settings", path));
  for (const auto& [name, value] : settings.object()) {
    try {
      config.set(name, text_of(name, value));
    } catch (const Error& error) {
      throw ConfigError(fmt::format("config '{}', \"{}\": {}", path, name, error.what()));
    }
  }
  return config;
}

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
