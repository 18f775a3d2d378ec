// How much memory this process may still take: what the machine has, and what its control groups leave of that. In a
// container, or under a batch system, they leave less. Only reads files of Linux, at every call.
#pragma once

#include <cstddef>
#include <filesystem>

namespace zeropage {

/// Bytes: the least of MemAvailable and, for the process's memory cgroup (version 1 or 2) and each above it, the
/// limit less what is used. Files cached there that the kernel drops first count as free, as in MemAvailable. 1 GiB
/// if /proc/meminfo cannot be read. `root` is where / is.
std::size_t available_memory(const std::filesystem::path& root = "/");

}  // namespace zeropage
