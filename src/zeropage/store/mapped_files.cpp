#include "zeropage/store/mapped_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

/// A line of /proc/self/maps (man 5 proc_pid_maps).
struct Mapping {
  std::uintptr_t begin = 0, end = 0;
  std::string rights;
  std::uint64_t offset = 0;
  std::string device, inode, path;

  std::string identity() const { return device + " " + inode; }
};

/// The mapping with the address; without a path if there is none.
Mapping mapping_of(const void* data) {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    Mapping mapping;
    char dash = 0;
    std::istringstream words(line);
    words >> std::hex >> mapping.begin >> dash >> mapping.end >> mapping.rights >> mapping.offset >> mapping.device >>
        mapping.inode;
    if (!words || at < mapping.begin || at >= mapping.end) continue;
    std::getline(words >> std::ws, mapping.path);
    return mapping;
  }
  return {};
}

/// Whether a private mapping still shows the file: none of its pages was written (and so copied) or swapped out (man
/// 5 proc_pid_pagemap).
bool is_as_in_file(const void* data, std::size_t bytes) {
  constexpr std::uint64_t kPresent = std::uint64_t{1} << 63, kSwapped = std::uint64_t{1} << 62,
                          kOfFile = std::uint64_t{1} << 61;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / page;
  const auto end = ceil_div(reinterpret_cast<std::uintptr_t>(data) + bytes, page);
  const File pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), "/proc/self/pagemap");
  if (!pagemap) return false;
  std::vector<std::uint64_t> entries(std::min<std::size_t>(end - begin, std::size_t{1} << 15));
  for (std::uintptr_t first = begin; first < end; first += entries.size()) {
    entries.resize(std::min<std::size_t>(entries.size(), end - first));
    pagemap.read(first * sizeof(std::uint64_t), reinterpret_cast<std::byte*>(entries.data()),
                 entries.size() * sizeof(std::uint64_t));
    const auto is_own = [](std::uint64_t entry) {
      return (entry & kSwapped) != 0 || ((entry & kPresent) != 0 && (entry & kOfFile) == 0);
    };
    if (std::ranges::any_of(entries, is_own)) return false;
  }
  return true;
}

/// Whether the file is the mapped one: its name may belong to another file by now. On some file systems stat() and
/// maps give different identities, so this maps the file too.
bool is_mapped(const SourceFile& file, const Mapping& mapping) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  void* const at = ::mmap(nullptr, page, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (at == MAP_FAILED) return false;
  const bool same = mapping_of(at).identity() == mapping.identity();
  ::munmap(at, page);
  return same;
}

}  // namespace

SourceRange MappedFiles::find(const void* data, std::size_t bytes) noexcept try {
  const Mapping mapping = mapping_of(data);
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (mapping.path.empty() || mapping.path[0] != '/' || mapping.inode == "0" || at + bytes > mapping.end) return {};
  // Other processes may write through a shared mapping, so the file may have changed.
  const bool is_private = mapping.rights.size() == 4 && mapping.rights[3] == 'p';
  if (!is_private && mapping.rights[1] == 'w') return {};
  if (is_private && !is_as_in_file(data, bytes)) return {};
  std::lock_guard lock(mutex_);
  std::weak_ptr<const SourceFile>& known = known_[mapping.identity()];
  std::shared_ptr<const SourceFile> file = known.lock();
  if (!file) {
    file = std::make_shared<const SourceFile>(mapping.path);
    if (!is_mapped(*file, mapping)) return {};
    known = file;
  }
  const std::uint64_t offset = mapping.offset + (at - mapping.begin);
  if (offset + bytes > file->size()) return {};
  file->check();
  return {std::move(file), offset};
} catch (...) {
  return {};
}

}  // namespace zeropage
