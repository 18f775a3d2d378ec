// Previews: what deferred operators will make, for an operator that reads it once. The operators stay deferred.
//
// A lookup in an embedding needs few rows. Its update may read many times the bytes, and wait for them where nothing
// else can be computed: at the beginning of forward. A preview reads the rows alone, of all of the program's
// operands, and computes them in memory of its own. The program then runs in between the next operators, and the rest
// of it when an operator needs the whole tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropage {

/// Makes an ordinary copy of the content that deferred operators will give `tensor`, for an operator that reads it
/// once. The operators stay deferred and `tensor` without a home. Undefined unless `tensor` is all that they write.
at::Tensor preview(const at::Tensor& tensor);

/// The rows of `weight`, [n, columns], that `indices`, [n] on the CPU, name. Undefined if they are not deferred, or
/// cannot be previewed, or are too many, or one does not exist. Throws the errors of reads.
at::Tensor preview_rows(const at::Tensor& weight, const at::Tensor& indices);

}  // namespace zeropage
