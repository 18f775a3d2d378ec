// Copies past the processor's caches, for what nothing reads again soon.
#pragma once

#include <cstddef>

namespace zeropage::kernels {

/// Copies `bytes` between ranges that do not overlap. Cache lines of `to`, except a few at its ends, are written
/// without being read, and push nothing out of the caches. When it returns, other threads and devices see them, as
/// after memcpy. It is memcpy itself on processors other than x86-64.
void copy_past_caches(void* to, const void* from, std::size_t bytes);

}  // namespace zeropage::kernels
