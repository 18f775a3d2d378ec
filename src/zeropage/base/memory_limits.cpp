#include "zeropage/base/memory_limits.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "zeropage/base/units.h"

namespace zeropage {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

/// Nothing if the file is missing or holds no number: "max".
std::optional<std::size_t> number_in(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::size_t number = 0;
  return stream >> number ? std::optional(number) : std::nullopt;
}

/// The number that follows `word` in a file of words and numbers.
std::optional<std::size_t> number_after(const std::string& word, const std::filesystem::path& file) {
  std::ifstream stream(file);
  for (std::string found; stream >> found;) {
    std::size_t number = 0;
    if (found == word && stream >> number) return number;
  }
  return std::nullopt;
}

/// The file names of a version of cgroups.
struct Version {
  const char* limits[2];  // the second throttles the group
  const char* usage;
  const char* reclaimable;  // in memory.stat
};
constexpr Version kFirst{{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file"};
constexpr Version kSecond{{"memory.max", "memory.high"}, "memory.current", "inactive_file"};

std::size_t left_in(const std::filesystem::path& group, const Version& version) {
  std::size_t limit = kUnlimited;
  for (const char* const name : version.limits) {
    if (name) limit = std::min(limit, number_in(group / name).value_or(kUnlimited));
  }
  const auto usage = number_in(group / version.usage);
  if (limit == kUnlimited || !usage) return kUnlimited;
  const std::size_t reclaimable = number_after(version.reclaimable, group / "memory.stat").value_or(0);
  const std::size_t used = *usage - std::min(*usage, reclaimable);
  return limit - std::min(limit, used);
}

/// The minimum left by `path` under `mount` and every group above it. In a container `path` may be the host's and not
/// exist; then only `mount` counts.
std::size_t left_up_to(const std::filesystem::path& mount, std::filesystem::path path, const Version& version) {
  std::size_t left = left_in(mount, version);
  for (path = path.relative_path(); !path.empty(); path = path.parent_path()) {
    left = std::min(left, left_in(mount / path, version));
  }
  return left;
}

}  // namespace

std::size_t available_memory(const std::filesystem::path& root) {
  const auto available_kib = number_after("MemAvailable:", root / "proc/meminfo");
  std::size_t available = available_kib ? *available_kib * kKiB : kGiB;
  // Lines are "number:controllers:path"; version 2 has no controllers there.
  std::ifstream groups(root / "proc/self/cgroup");
  const std::filesystem::path mount = root / "sys/fs/cgroup";
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      available = std::min(available, left_up_to(mount, path, kSecond));
    } else if (controllers.find(",memory,") != std::string::npos) {
      available = std::min(available, left_up_to(mount / "memory", path, kFirst));
    }
  }
  return available;
}

}  // namespace zeropage
