// The file `zeropage-checkpoint.json`, which makes a folder a checkpoint. It has three lines of JSON: a head, the
// body, and the CRC-32 of both. The body lists the files, and holds everything that is not a tensor. Python's
// _checkpoint/manifest.py reads and writes the same. Private to checkpoint/.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "zeropage/base/json.h"
#include "zeropage/checkpoint/partial_folder.h"

namespace zeropage {

struct Manifest {
  static constexpr const char* kName = "zeropage-checkpoint.json";

  std::filesystem::path path;
  Json body;
  std::uint32_t crc = 0;  // of the whole content
  std::string run;        // the name of the run that made it

  /// Reads the manifest in a folder. Throws DiskError if it is damaged or missing; Error for another format, and for
  /// names that lead out of the folder.
  static Manifest read(const std::filesystem::path& folder);
  /// The content of the file.
  static std::string encode(const Json& body, const std::string& run);

  /// The names of the files that the checkpoint consists of, this one included.
  Names names() const;
  /// Names of the files, if the folder is an intact checkpoint.
  static std::optional<Names> names_in(const std::filesystem::path& folder);
};

/// The checkpoint `folder`, or the latest one in it. Throws DiskError if there is none.
std::filesystem::path find_checkpoint(const std::filesystem::path& folder);

/// The run that this process trains: a new name, or that of the last continue_run() with one.
std::string current_run();
void continue_run(const std::string& run);

}  // namespace zeropage
