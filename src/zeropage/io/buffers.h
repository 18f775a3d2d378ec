// Buffers for sequential transfers of files: a few blocks, aligned for O_DIRECT.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "zeropage/base/units.h"

namespace zeropage {

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<std::byte, FreeMemory>;

/// `bytes` is a multiple of kBlockBytes. Throws std::bad_alloc.
inline Buffer make_buffer(std::size_t bytes) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes));
  if (!memory) throw std::bad_alloc();
  return Buffer(memory);
}

}  // namespace zeropage
