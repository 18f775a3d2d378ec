// A folder that appears complete or not at all. It is made next to its place, under another name, and moved there.
// Names are those of Python's _partial.py and _checkpoint/folders.py, and so are the rules for folders of dead
// processes. Programs in both languages may therefore save to one folder. Private to checkpoint/.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace zeropage {

using Names = std::set<std::string>;

class PartialFolder {
 public:
  /// Returns the names of a replaceable folder's files; nothing for any other folder.
  using Listed = std::function<std::optional<Names>(const std::filesystem::path&)>;

  /// Makes it. The place must be free, an empty folder, or one that `listed` knows. Throws Error if anything else is
  /// there, or if another process is saving to it; DiskError.
  PartialFolder(std::filesystem::path place, Listed listed);
  /// Removes the partial folder, unless it has appeared.
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  const std::filesystem::path& path() const;
  /// The names at the place that are no files of the checkpoint there, and stay. Throws Error if the new folder has a
  /// file of such a name, or if the place may not be replaced.
  Names check_names() const;
  /// Moves it durably to its place, then removes the earlier folder.
  void appear();

 private:
  class Owned;
  Names strangers() const;
  void replace();

  const std::filesystem::path place_;
  const Listed listed_;
  std::unique_ptr<Owned> owned_;  // null: it has appeared
};

/// Moves back the folder `name`, or every folder, that a dead process moved aside and did not replace. Throws
/// DiskError if one cannot be moved.
void recover(const std::filesystem::path& parent, const std::optional<std::string>& name = std::nullopt);

/// Writes a file and flushes it to the disk. Throws DiskError.
void write_file(const std::filesystem::path& path, std::string_view data);
/// The whole content of a small file. Throws DiskError.
std::string read_file(const std::filesystem::path& path);

}  // namespace zeropage
