// Optimizer updates: everything that a step does to a range of elements, in one pass over memory. The gradient is
// scaled (loss scale, clipping) and its non-finite values are counted, parameter and states are updated, and the
// parameter is cast to what operators see, block by block, in the first cache. No torch, no allocation, no threads:
// callers share ranges among theirs.
//
// Compiled for AVX-512, AVX2 with FMA, and the baseline of the machine (SSE2, NEON); which runs is found out at run
// time. With float32 throughout, Adam, AdamW, SGD and Adagrad do what PyTorch's fused kernels do, in the same order
// of operations and with the same fused multiply-adds: the same bits where the processor has AVX2 or more.
#pragma once

#include <string_view>

#include "zeropage/kernels/formats.h"

namespace zeropage::kernels {

enum class Rule : std::uint8_t { adam, adamw, sgd, adagrad, lion };

/// What a gradient is multiplied or divided by before it is used.
struct Scale {
  float value = 1;
  bool divides = false;
};
inline constexpr std::size_t kMostScales = 4;

struct Update {
  Rule rule = Rule::adamw;
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  // adam, adamw; eps: adagrad; betas: lion
  double weight_decay = 0;                        // of adamw and lion decoupled (Loshchilov & Hutter, 2019)
  double momentum = 0, dampening = 0;             // sgd
  double lr_decay = 0;                            // adagrad
  double step = 1;                                // this one included
  bool amsgrad = false, maximize = false, nesterov = false;
  bool first_momentum = false;  // sgd: the buffer starts as the gradient
  Scale scales[kMostScales];    // in this order
  std::size_t scale_count = 0;
  bool store_gradient = false;  // as scaled, and widened
  std::size_t vector = 8;       // elements that PyTorch's kernels take at once on this machine
};

/// Arrays of one length. States: adam exp_avg, exp_avg_sq, and with amsgrad max_exp_avg_sq; sgd the momentum buffer,
/// if any; adagrad the sum; lion exp_avg. `visible`: what operators see of the parameter, or none. `narrow_gradient`:
/// what the gradient is read from in place of `gradient`, or none.
struct Arrays {
  Array parameter, gradient, visible;
  Array state[3];
  Array narrow_gradient = {};
};

/// Updates elements [begin, end) and returns how many non-finite values the gradient had before it was scaled. Ranges
/// of blocks8 arrays begin at a multiple of kQuantum.
std::size_t update(const Update& update, const Arrays& arrays, std::size_t begin, std::size_t end);

/// An array's elements as floats, and the other way round.
void decode(const Array& array, std::size_t begin, std::size_t end, float* to);
void encode(const Array& array, std::size_t begin, std::size_t end, const float* from);

/// "avx512", "avx2" or "baseline": what this machine runs.
std::string_view instruction_set();

}  // namespace zeropage::kernels
