// While a space on the CPU is open, PyTorch's large tensors on the CPU come from a heap on huge pages
// ([Note: what malloc keeps] in io/tensor_heap.h).
#pragma once

#include <cstddef>
#include <memory>

namespace zeropage {

/// Installs the heap as PyTorch's allocator until the result and all others like it are gone. Tensors keep their
/// memory as long as they live. Has no effect if another library's allocator has a higher priority or cannot free a
/// bare address, in a forked child, and under the address sanitizer. The result may be null.
std::shared_ptr<void> use_tensor_heap();

/// Returns the heap's free memory to the system, for those who ask how much memory is free.
void trim_tensor_heap();

/// Bytes of the tensors that the heap holds, which no statistics of malloc count.
std::size_t tensor_heap_bytes();

}  // namespace zeropage
