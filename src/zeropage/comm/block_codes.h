// Tensors in blocks of 8 or 4 bits an element (kernels/block_codes.h): by our kernels on the CPU, and in the same
// format by PyTorch's operators on other devices.
#pragma once

#include <ATen/core/Tensor.h>

#include "zeropage/kernels/block_codes.h"

namespace zeropage {

/// The codes of a flat float32, bfloat16 or float16 tensor: uint8, [coded_bytes(numel, bits)].
at::Tensor code(const at::Tensor& flat, kernels::CodeBits bits);
/// Writes the codes into `to`, uint8 and contiguous.
void code_into(const at::Tensor& to, const at::Tensor& flat, kernels::CodeBits bits);
/// Writes the elements that `coded` stands for into `to`, which is flat and contiguous. On the CPU, `coded` may be at
/// the end of the memory of `to`, or before it by what follows there (kernels::uncode).
void uncode_into(const at::Tensor& to, const at::Tensor& coded, kernels::CodeBits bits);

/// The same by PyTorch's operators alone, on any device.
at::Tensor code_by_torch(const at::Tensor& flat, kernels::CodeBits bits);
at::Tensor uncode_by_torch(const at::Tensor& coded, std::int64_t elements, kernels::CodeBits bits);

}  // namespace zeropage
