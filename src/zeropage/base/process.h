// Identifies the process and the thread. Memory that a disk is reading into, rings and locks do not survive fork(); a
// paged tensor belongs to the process that made it. A call costs one atomic load, so every fault can make it.
#pragma once

#include <cstdint>

namespace zeropage {

/// Grows by one in the child at every fork(). Equal values mean the same process.
std::uint64_t process_generation() noexcept;

/// The calling thread's number. Unlike std::thread::id, no later thread gets it.
std::uint64_t this_thread_number() noexcept;

/// Whether the dynamic linker finds `symbol` in this library before any other that the process has loaded.
bool defines_first(const char* symbol) noexcept;

}  // namespace zeropage
