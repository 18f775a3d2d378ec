// The mean over ranks of a gradient, in one pass over memory: parts are summed in float32, in rank order, divided by
// their number, and written to or added to the result. No torch, no allocation, no threads.
#pragma once

#include <cstddef>
#include <span>

#include "zeropage/kernels/formats.h"

namespace zeropage::kernels {

struct Mean {
  std::span<const Array> parts;        // one a rank; float32, bfloat16 or float16.
  Format rounds_to = Format::float32;  // the mean is rounded to this format before it is stored.
  bool keeps_equal = false;            // a value that all ranks have stays as it is
  bool adds = false;                   // to the result's values, in float32
};

/// Sets, or adds to, elements [0, count) of `to`: float32, bfloat16 or float16. `to` may be one of the parts.
void take_mean(const Mean& mean, const Array& to, std::size_t count);

}  // namespace zeropage::kernels
