// malloc's heap, where ordinary tensors on the CPU live.
#pragma once

#include <cstddef>

namespace zeropage {

/// Gives holes in the heap back to the system, now and then ([Note: what malloc keeps]). `bytes` have been freed, or
/// will be soon. Any thread.
void give_back_holes(std::size_t bytes);

}  // namespace zeropage
