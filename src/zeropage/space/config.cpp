#include "zeropage/space/config.h"

#include <fmt/format.h>

#include <array>

#include "zeropage/base/errors.h"

namespace zeropage {
namespace {

struct Setting {
  std::string_view name;
  std::string Config::*value;
};
constexpr std::array<Setting, 29> kSettings{{{"device", &Config::device},
                                             {"parameters", &Config::parameters},
                                             {"gradients", &Config::gradients},
                                             {"optimizer", &Config::optimizer},
                                             {"activations", &Config::activations},
                                             {"disk_path", &Config::disk_path},
                                             {"device_memory", &Config::device_memory},
                                             {"host_memory", &Config::host_memory},
                                             {"resident_below", &Config::resident_below},
                                             {"page_size", &Config::page_size},
                                             {"tiling", &Config::tiling},
                                             {"tile_above", &Config::tile_above},
                                             {"io", &Config::io},
                                             {"io_block", &Config::io_block},
                                             {"io_depth", &Config::io_depth},
                                             {"memory", &Config::memory},
                                             {"async_step", &Config::async_step},
                                             {"update_ahead", &Config::update_ahead},
                                             {"update_on", &Config::update_on},
                                             {"visible_dtype", &Config::visible_dtype},
                                             {"master_dtype", &Config::master_dtype},
                                             {"gradient_dtype", &Config::gradient_dtype},
                                             {"state_dict", &Config::state_dict},
                                             {"file_homes", &Config::file_homes},
                                             {"optimizer_dtype", &Config::optimizer_dtype},
                                             {"stage", &Config::stage},
                                             {"partition", &Config::partition},
                                             {"reduce_dtype", &Config::reduce_dtype},
                                             {"check_ranks", &Config::check_ranks}}};

}  // namespace

void Config::set(std::string_view name, std::string value) {
  std::string known;
  for (const Setting& setting : kSettings) {
    if (setting.name == name) {
      this->*setting.value = std::move(value);
      return;
    }
    known += fmt::format("{}{}", known.empty() ? "" : ", ", setting.name);
  }
  throw SettingError(fmt::format("\"{}\" is not a setting; the settings are {}", name, known));
}

std::vector<std::pair<std::string, std::string>> Config::items() const {
  std::vector<std::pair<std::string, std::string>> items;
  for (const Setting& setting : kSettings) items.emplace_back(setting.name, this->*setting.value);
  return items;
}

}  // namespace zeropage
