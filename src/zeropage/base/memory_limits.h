// The memory that this process may still use: the machine's free memory, less what its control groups forbid. In a
// container, or under a batch system, they allow less. Reads Linux's files at every call.
#pragma once

#include <cstddef>
#include <filesystem>

namespace zeropage {

/// In bytes: the minimum of MemAvailable and, for the process's memory cgroup (version 1 or 2) and each above it, its
/// limit (memory.max or memory.high) minus its use. Cached files that the kernel drops first count as free, as in
/// MemAvailable. 1 GiB if /proc/meminfo cannot be read. `root` stands for /.
std::size_t available_memory(const std::filesystem::path& root = "/");

}  // namespace zeropage
