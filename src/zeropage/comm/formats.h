// PyTorch's dtypes as the kernels name them.
#pragma once

#include <ATen/core/Tensor.h>

#include "zeropage/kernels/formats.h"

namespace zeropage {

/// None if the kernels lack it.
inline kernels::Format format_of(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernels::Format::float32;
    case at::kBFloat16:
      return kernels::Format::bfloat16;
    case at::kHalf:
      return kernels::Format::float16;
    default:
      return kernels::Format::none;
  }
}

/// A tensor's memory from element `begin` on.
inline kernels::Array array_of(const at::Tensor& tensor, std::int64_t begin) {
  return {format_of(tensor.scalar_type()),
          static_cast<std::byte*>(tensor.mutable_data_ptr()) + begin * static_cast<std::int64_t>(tensor.itemsize())};
}

}  // namespace zeropage
