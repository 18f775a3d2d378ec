#include "zeropage/store/mapped_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/limits.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <optional>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

struct Mapping {
  std::uintptr_t begin = 0, end = 0;
  bool is_writable = false, is_shared = false;
  std::uint64_t offset = 0, inode = 0;
  unsigned device[2] = {};
  std::string path;  // empty if there is no mapping, or it has no name

  std::string identity() const { return fmt::format("{:x}:{:x} {}", device[0], device[1], inode); }
};

/// The argument of PROCMAP_QUERY, an ioctl of Linux 6.11 (linux/fs.h).
struct MapQuery {
  std::uint64_t size, flags, address;
  std::uint64_t begin, end, rights, page_bytes, offset, inode;
  std::uint32_t device[2], name_bytes, build_id_bytes;
  std::uint64_t name, build_id;
};

/// The mapping with the address, found in its kernel's tree of mappings. None on older kernels.
std::optional<Mapping> query_mapping_of(const File& maps, std::uintptr_t at) {
  constexpr unsigned long kQuery = _IOWR('f', 17, MapQuery);
  constexpr std::uint64_t kWritable = 2, kShared = 8;
  char name[PATH_MAX] = {};
  MapQuery query{};
  query.size = sizeof(query);
  query.address = at;
  query.name = reinterpret_cast<std::uintptr_t>(name);
  query.name_bytes = sizeof(name);
  if (::ioctl(maps.descriptor(), kQuery, &query) != 0) {
    if (errno == ENOENT) return Mapping();
    return std::nullopt;
  }
  return Mapping{query.begin,  query.end,   (query.rights & kWritable) != 0,    (query.rights & kShared) != 0,
                 query.offset, query.inode, {query.device[0], query.device[1]}, query.name_bytes > 0 ? name : ""};
}

/// The same from the lines of /proc/self/maps (man 5 proc_pid_maps), which takes long for thousands of mappings.
Mapping parse_mapping_of(std::uintptr_t at) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    Mapping found;
    char rights[5] = {};
    int path = 0;
    const int words = std::sscanf(line.c_str(), "%lx-%lx %4s %lx %x:%x %lu %n", &found.begin, &found.end, rights,
                                  &found.offset, &found.device[0], &found.device[1], &found.inode, &path);
    if (words < 7 || at < found.begin || at >= found.end) continue;
    found.is_writable = rights[1] == 'w';
    found.is_shared = rights[3] == 's';
    found.path = line.substr(path);
    return found;
  }
  return {};
}

Mapping mapping_of(const void* data) {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  const File maps(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC), "/proc/self/maps");
  auto found = query_mapping_of(maps, at);
  return found ? std::move(*found) : parse_mapping_of(at);
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
  if (mapping.path.empty() || mapping.path[0] != '/' || mapping.inode == 0 || at + bytes > mapping.end) return {};
  // Other processes may write through a shared mapping, so the file may have changed.
  if (mapping.is_shared ? mapping.is_writable : !is_as_in_file(data, bytes)) return {};
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
