#include "zeropage/checkpoint/manifest.h"

#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <mutex>
#include <random>

#include "zeropage/base/errors.h"
#include "zeropage/io/checksum.h"

namespace zeropage {
namespace {

constexpr int kFormat = 2;
constexpr const char* kMagic = "checkpoint";

std::mutex run_mutex;
std::string run_of_process;

std::uint32_t crc_of(std::string_view text) { return crc32(0, std::as_bytes(std::span(text))); }

bool is_name_in_folder(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos && name.find('\0') == name.npos;
}

/// When a checkpoint was saved, in nanoseconds since the epoch; -1 for a folder without a manifest.
std::int64_t time_of(const std::filesystem::path& folder) {
  std::ifstream file(folder / Manifest::kName);
  if (!file) return -1;
  std::string line;
  std::getline(file, line);
  try {
    return std::max<std::int64_t>(Json::parse(line).at("time_ns").integer(), 0);
  } catch (const JsonError&) {
    return 0;  // damaged: load() throws
  }
}

/// Splits and compares the file's content. Throws JsonError if it is damaged.
Manifest parse(const std::filesystem::path& path, std::string_view data, std::int64_t& format) {
  while (data.ends_with('\n')) data.remove_suffix(1);
  const std::size_t end = data.rfind('\n'), first_end = data.find('\n');
  if (end == data.npos || first_end >= end) throw JsonError("a line is missing");
  const std::string_view covered = data.substr(0, end);
  const Json head = Json::parse(data.substr(0, first_end));
  const std::uint64_t crc = Json::parse(data.substr(end + 1)).at("crc").count();
  if (head.at("zeropage").text() != kMagic || crc != crc_of(covered)) throw JsonError("the checksum differs");
  format = head.at("format").integer();
  const Json* const run = head.find("run");
  return {path, Json::parse(covered.substr(first_end + 1)), static_cast<std::uint32_t>(crc),
          run && run->is_text() ? run->text() : ""};
}

}  // namespace

Manifest Manifest::read(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kName;
  const std::string data = read_file(path);
  Manifest manifest;
  Names names;
  std::int64_t format = 0;
  try {
    manifest = parse(path, data, format);
    names = manifest.names();
  } catch (const JsonError&) {
    throw DiskError(fmt::format("\"{}\" is damaged; load another checkpoint", path.string()), EIO, path.string());
  }
  if (format != kFormat) {
    throw Error(fmt::format("\"{}\" has format {}; this zeropage reads format {}: update it", folder.string(), format,
                            kFormat));
  }
  for (const std::string& name : names) {
    if (is_name_in_folder(name)) continue;
    throw Error(
        fmt::format("\"{}\" names a file outside its folder: \"{}\"; zeropage did not write this: do not use it",
                    path.string(), name));
  }
  return manifest;
}

std::string Manifest::encode(const Json& body, const std::string& run) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const Json head(Json::Object{{"zeropage", kMagic},
                               {"format", kFormat},
                               {"time_ns", std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()},
                               {"run", run}});
  const std::string covered = head.dump() + "\n" + body.dump();
  return fmt::format("{}\n{{\"crc\": {}}}\n", covered, crc_of(covered));
}

Names Manifest::names() const {
  Names names{path.filename().string()};
  for (const char* part : {"files", "others"}) {
    for (const auto& [name, _] : body.at(part).object()) names.insert(name);
  }
  return names;
}

std::optional<Names> Manifest::names_in(const std::filesystem::path& folder) {
  try {
    return read(folder).names();
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::filesystem::path find_checkpoint(const std::filesystem::path& folder) {
  const std::filesystem::path place = std::filesystem::weakly_canonical(std::filesystem::absolute(folder));
  // A trailing slash would leave the last name empty.
  recover(place.has_filename() ? place.parent_path() : place.parent_path().parent_path(),
          (place.has_filename() ? place : place.parent_path()).filename().string());
  if (time_of(folder) >= 0) return std::filesystem::canonical(folder);
  recover(folder);
  std::filesystem::path latest;
  std::int64_t time = -1;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (entry.path().filename().string().starts_with('.')) continue;
    const std::int64_t other = time_of(entry.path());
    if (other > time || (other == time && other >= 0 && entry.path() > latest)) latest = entry.path(), time = other;
  }
  if (latest.empty()) {
    throw DiskError(fmt::format("\"{}\" is no checkpoint, and holds none: there is no {} in it", folder.string(),
                                Manifest::kName),
                    ENOENT, folder.string());
  }
  return std::filesystem::canonical(latest);
}

std::string current_run() {
  const std::lock_guard lock(run_mutex);
  if (run_of_process.empty()) {
    std::random_device source;
    run_of_process = fmt::format("{:08x}{:08x}", source(), source());
  }
  return run_of_process;
}

void continue_run(const std::string& run) {
  const std::lock_guard lock(run_mutex);
  if (!run.empty()) run_of_process = run;
}

}  // namespace zeropage
