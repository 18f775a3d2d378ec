// Which process are we in? Memory that is being read into by a disk, rings and locks do not survive fork(); a paged
// tensor belongs to the process that made it. The answer costs one atomic load, so every fault can ask.
#pragma once

#include <cstdint>

namespace zeropage {

/// Grows by one in the child at every fork(). Equal values mean: the same process.
std::uint64_t process_generation() noexcept;

}  // namespace zeropage
