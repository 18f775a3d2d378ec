// malloc's heap, which holds ordinary tensors on the CPU.
#pragma once

#include <cstddef>

namespace zeropage {

/// Now and then returns holes in the heap to the system ([Note: what malloc keeps]). `bytes` have been freed, or will
/// be soon. Any thread may call it.
void give_back_holes(std::size_t bytes);

}  // namespace zeropage
