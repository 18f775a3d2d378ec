// Optimizer updates: all work of a step on a range of elements, in one pass over memory. It scales the gradient (loss
// scale, clipping) and counts its non-finite values. It then updates parameter and states, and casts the parameter to
// the dtype that operators see. It works block by block, in the first-level cache. No torch, no allocation, no
// threads: callers divide ranges among their threads.
//
// Compiled for AVX-512, AVX2 with FMA, and the machine's baseline (SSE2, NEON), and chosen at run time. With float32
// throughout, Adam, AdamW, SGD and Adagrad repeat PyTorch's fused kernels: the same order of operations and the same
// fused multiply-adds. The bits are equal on processors with AVX2 or more.
#pragma once

#include <string_view>

#include "zeropage/kernels/formats.h"

namespace zeropage::kernels {

enum class Rule : std::uint8_t { adam, adamw, sgd, adagrad, lion };

/// A factor or divisor of the gradient, applied before its use.
struct Scale {
  float value = 1;
  bool divides = false;
};
inline constexpr std::size_t kMostScales = 4;

struct Update {
  Rule rule = Rule::adamw;
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  // adam, adamw; eps: adagrad; betas: lion
  double weight_decay = 0;                        // adamw, lion: decoupled (Loshchilov & Hutter, 2019)
  double momentum = 0, dampening = 0;             // sgd
  double lr_decay = 0;                            // adagrad
  double step = 1;                                // including this one
  bool amsgrad = false, maximize = false, nesterov = false;
  bool first_momentum = false;  // sgd: initialise the buffer to the gradient
  Scale scales[kMostScales];    // in this order
  std::size_t scale_count = 0;
  bool store_gradient = false;  // scaled and widened
  std::size_t vector = 8;       // elements in a vector of PyTorch's kernels on this machine
};

/// Arrays of one length. States: adam exp_avg, exp_avg_sq, and with amsgrad max_exp_avg_sq; sgd the momentum buffer,
/// if any; adagrad the sum; lion exp_avg. `visible`: the parameter as operators see it, or none. `narrow_gradient`:
/// read instead of `gradient`, or none.
struct Arrays {
  Array parameter, gradient, visible;
  Array state[3];
  Array narrow_gradient = {};
};

/// Updates elements [begin, end) and returns how many non-finite values the gradient had before it was scaled. Ranges
/// of blocks8 arrays begin at a multiple of kQuantum.
std::size_t update(const Update& update, const Arrays& arrays, std::size_t begin, std::size_t end);

/// Convert an array's elements to floats, and back.
void decode(const Array& array, std::size_t begin, std::size_t end, float* to);
void encode(const Array& array, std::size_t begin, std::size_t end, const float* from);

/// "avx512", "avx2" or "baseline": the one that this machine runs.
std::string_view instruction_set();

}  // namespace zeropage::kernels
