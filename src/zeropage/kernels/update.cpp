#include "zeropage/kernels/update.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace zeropage::kernels {
namespace {

#if defined(__aarch64__)
constexpr bool kBaselineHasFma = true;
#else
constexpr bool kBaselineHasFma = false;
#endif

/// a * b + c, rounded once if the instruction set can.
template <bool fma>
ZEROPAGE_INLINE float multiply_add(float a, float b, float c) {
  return fma ? __builtin_fmaf(a, b, c) : a * b + c;
}

constexpr std::size_t kBlock = kQuantum;  // elements: several arrays of them, as floats, fit the first-level cache

// --- loads and stores of one block ---

template <class Decode>
ZEROPAGE_INLINE void decode(float* __restrict to, const std::uint16_t* __restrict from, std::size_t n, Decode one) {
  for (std::size_t i = 0; i < n; ++i) to[i] = one(from[i]);
}

template <class Encode>
ZEROPAGE_INLINE void encode(std::uint16_t* __restrict to, const float* __restrict from, std::size_t n, Encode one) {
  for (std::size_t i = 0; i < n; ++i) to[i] = one(from[i]);
}

ZEROPAGE_INLINE std::uint32_t is_not_finite(float x) {
  return (std::bit_cast<std::uint32_t>(x) & 0x7f800000) == 0x7f800000 ? 1 : 0;
}

/// NaN if one of them is NaN.
ZEROPAGE_INLINE float largest_magnitude(const float* x, std::size_t n) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return std::bit_cast<float>(largest);
}

/// Floats of few bits, with `exponents` exponents, the largest that of numbers in [1, 2), and `mantissa` bits. The
/// smallest exponent is denormal.
template <int exponents, int mantissa>
struct SmallFloat {
  static constexpr std::uint32_t kSteps = 1u << mantissa;          // per power of two
  static constexpr std::uint32_t kSmallest = 127 - exponents + 2;  // float exponent of the smallest normal number
  static constexpr float kTop = 2.0f - 1.0f / kSteps;

  ZEROPAGE_INLINE static float decode(std::uint32_t x) {
    const float normal = std::bit_cast<float>((x << (23 - mantissa)) + ((kSmallest - 1) << 23));
    const float denormal = std::bit_cast<float>((kSmallest - mantissa) << 23) * static_cast<float>(x);
    return x < kSteps ? denormal : normal;
  }
  ZEROPAGE_INLINE static std::uint32_t encode(float x) {  // x in [0, kTop]
    constexpr int kDrop = 23 - mantissa;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x) - ((kSmallest - 1) << 23);
    const std::uint32_t normal = (bits + (1u << (kDrop - 1)) - 1 + ((bits >> kDrop) & 1)) >> kDrop;
    constexpr float kRound = 0x1.8p23f;
    const float steps = x * (1 / std::bit_cast<float>((kSmallest - mantissa) << 23));
    const auto denormal = static_cast<std::uint32_t>(static_cast<std::int32_t>((steps + kRound) - kRound));
    return x < std::bit_cast<float>(kSmallest << 23) ? denormal : normal;
  }
};

using SignedCode = SmallFloat<8, 4>;
using UnsignedCode = SmallFloat<16, 4>;

ZEROPAGE_INLINE void decode_blocks8(float* __restrict to, const std::uint8_t* __restrict from, float scale,
                                    bool is_signed, std::size_t n) {
  if (is_signed) {
    for (std::size_t i = 0; i < n; ++i) {
      const float magnitude = SignedCode::decode(from[i] & 0x7fu) * scale;
      to[i] = from[i] & 0x80 ? -magnitude : magnitude;
    }
  } else {
    for (std::size_t i = 0; i < n; ++i) to[i] = UnsignedCode::decode(from[i]) * scale;
  }
}

/// A block with a value that is not finite becomes NaN as a whole: its scale is NaN and its codes are 0.
ZEROPAGE_INLINE void encode_blocks8(std::uint8_t* __restrict to, const float* __restrict from, float* scale_of_block,
                                    bool is_signed, std::size_t n) {
  const float top = is_signed ? SignedCode::kTop : UnsignedCode::kTop;
  const float largest = largest_magnitude(from, n);
  if (is_not_finite(largest)) {
    *scale_of_block = __builtin_nanf("");
    std::memset(to, 0, n);
    return;
  }
  const float scale = largest / top;
  const float inverse = scale > 0x1p-120f ? 1 / scale : 0;
  *scale_of_block = inverse > 0 ? scale : 0;
  if (is_signed) {
    for (std::size_t i = 0; i < n; ++i) {
      const float magnitude = std::min(__builtin_fabsf(from[i]) * inverse, SignedCode::kTop);
      to[i] = static_cast<std::uint8_t>(SignedCode::encode(magnitude) | (from[i] < 0 ? 0x80u : 0u));
    }
  } else {
    // Nonzero values stay nonzero: updates are divided by its root.
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t code =
          UnsignedCode::encode(std::min(std::max(from[i], 0.0f) * inverse, UnsignedCode::kTop));
      to[i] = static_cast<std::uint8_t>(code | (code == 0 && from[i] > 0 ? 1u : 0u));
    }
  }
}

/// The floats of a block: the array itself if it holds floats, else decoded into `scratch`.
ZEROPAGE_INLINE float* load(const Array& array, std::size_t at, std::size_t n, float* scratch) {
  switch (array.format) {
    case Format::none:
      return nullptr;
    case Format::float32:
      return static_cast<float*>(array.data) + at;
    case Format::bfloat16:
    case Format::stochastic_bfloat16:
      decode(scratch, static_cast<const std::uint16_t*>(array.data) + at, n, from_bfloat16);
      break;
    case Format::float16:
      decode(scratch, static_cast<const std::uint16_t*>(array.data) + at, n, from_float16);
      break;
    case Format::hi_lo_float32: {
      const auto* __restrict high = static_cast<const std::uint16_t*>(array.data) + at;
      const auto* __restrict low = static_cast<const std::int16_t*>(array.extra) + at;
      for (std::size_t i = 0; i < n; ++i) scratch[i] = join_hi_lo(high[i], low[i]);
      break;
    }
    case Format::signed_blocks8:
    case Format::unsigned_blocks8:
      decode_blocks8(scratch, static_cast<const std::uint8_t*>(array.data) + at,
                     static_cast<const float*>(array.extra)[at / kQuantum], array.format == Format::signed_blocks8,
                     n);
      break;
  }
  return scratch;
}

/// Stores values to the array that load() read.
ZEROPAGE_INLINE void store(const Array& array, std::size_t at, std::size_t n, const float* __restrict values) {
  switch (array.format) {
    case Format::none:
      return;
    case Format::float32: {
      auto* __restrict to = static_cast<float*>(array.data) + at;
      if (to == values) return;
      for (std::size_t i = 0; i < n; ++i) to[i] = values[i];
      return;
    }
    case Format::bfloat16:
      return encode(static_cast<std::uint16_t*>(array.data) + at, values, n, to_bfloat16);
    case Format::stochastic_bfloat16: {
      auto* __restrict to = static_cast<std::uint16_t*>(array.data) + at;
      const std::uint32_t seed = array.seed * 0x9e3779b9u;
      for (std::size_t i = 0; i < n; ++i) {
        to[i] = to_stochastic_bfloat16(values[i], hash(seed ^ std::bit_cast<std::uint32_t>(values[i])));
      }
      return;
    }
    case Format::float16:
      return encode(static_cast<std::uint16_t*>(array.data) + at, values, n, to_float16);
    case Format::hi_lo_float32: {
      auto* __restrict high = static_cast<std::uint16_t*>(array.data) + at;
      auto* __restrict low = static_cast<std::int16_t*>(array.extra) + at;
      for (std::size_t i = 0; i < n; ++i) {
        high[i] = high_of(values[i]);
        low[i] = low_of(values[i], high[i]);
      }
      return;
    }
    case Format::signed_blocks8:
    case Format::unsigned_blocks8:
      encode_blocks8(static_cast<std::uint8_t*>(array.data) + at, values,
                     static_cast<float*>(array.extra) + at / kQuantum, array.format == Format::signed_blocks8, n);
      return;
  }
}

// --- rules, for a block of floats ---

struct Block {
  float *parameter, *gradient, *state[3];
  std::size_t n;
  bool scalar;  // [Note: scalar ends]
};

/// a * b + c * d, where one product is rounded and the other is not. [Note: scalar ends]
template <bool fma>
ZEROPAGE_INLINE float blend(float a, float b, float c, float d, bool scalar) {
  return scalar ? multiply_add<fma>(a, b, c * d) : multiply_add<fma>(c, d, a * b);
}

/// Scales the gradient for the rule. Returns how many of its values were not finite.
ZEROPAGE_INLINE std::size_t scale_gradient(const Update& u, float* __restrict g, std::size_t n) {
  std::uint32_t not_finite = 0;
  for (std::size_t i = 0; i < n; ++i) not_finite += is_not_finite(g[i]);
  for (std::size_t s = 0; s < u.scale_count; ++s) {
    const float value = u.scales[s].value;
    if (u.scales[s].divides) {
      for (std::size_t i = 0; i < n; ++i) g[i] = g[i] / value;
    } else {
      for (std::size_t i = 0; i < n; ++i) g[i] = g[i] * value;
    }
  }
  return not_finite;
}

/// Adam's settings, prepared once.
struct AdamNumbers {
  explicit AdamNumbers(const Update& u)
      : step_size(static_cast<float>(u.lr / (1 - std::pow(u.beta1, u.step)))),
        bias2_sqrt(static_cast<float>(std::sqrt(1 - std::pow(u.beta2, u.step)))),
        eps(static_cast<float>(u.eps)),
        beta2(static_cast<float>(u.beta2)),
        of_square(static_cast<float>(1 - u.beta2)),
        keep(u.rule == Rule::adamw ? static_cast<float>(1 - u.lr * u.weight_decay) : 1),
        decay(u.rule == Rule::adam ? static_cast<float>(u.weight_decay) : 0) {
    // lerp starts from the nearer end.
    const auto of_gradient = static_cast<float>(1 - u.beta1);
    from_moment = of_gradient < 0.5f;
    weight = from_moment ? of_gradient : of_gradient - 1;
    scalar_weight = from_moment ? of_gradient : -(1 - of_gradient);
    for (std::size_t i = 0; i < u.scale_count; ++i) {
      if (u.scales[i].divides || i >= 2) simple = false;
      if (i < 2) scale[i] = u.scales[i].value;
    }
    sign = u.maximize ? -1.0f : 1.0f;
  }
  float step_size, bias2_sqrt, eps, beta2, of_square, keep, decay;
  float weight = 0, scalar_weight = 0, scale[2] = {1, 1}, sign = 1;
  bool from_moment = true;
  bool simple = true;  // at most two factors scale the gradient
};

/// Adam (Kingma & Ba, 2015), its AMSGrad variant (Reddi et al., 2018), and AdamW, in the order of at::native's
/// FusedAdamKernel. With `scales` the gradient is scaled here and its non-finite values are counted and returned.
template <bool fma, bool scales, bool decays, bool amsgrad, bool from_moment>
ZEROPAGE_INLINE std::uint32_t adam_loop(const AdamNumbers& a, const Block& b) {
  float* __restrict p = b.parameter;
  const float* __restrict g = b.gradient;
  float* __restrict m = b.state[0];
  float* __restrict v = b.state[1];
  float* __restrict largest = b.state[2];
  const float step_size = -a.step_size, bias2_sqrt = a.bias2_sqrt, eps = a.eps, beta2 = a.beta2;
  const float of_square = a.of_square, keep = a.keep, decay = a.decay;
  const float weight = b.scalar ? a.scalar_weight : a.weight;  // [Note: scalar ends]
  const float scale0 = a.scale[0], scale1 = a.scale[1], sign = a.sign;
  std::uint32_t not_finite = 0;
  for (std::size_t i = 0; i < b.n; ++i) {
    float gradient = g[i];
    if constexpr (scales) {
      not_finite += is_not_finite(gradient);
      gradient = gradient * scale0 * scale1 * sign;  // a factor of one is exact
    }
    float parameter = p[i];
    if constexpr (decays) {
      gradient = multiply_add<fma>(parameter, decay, gradient);
    } else {
      parameter = parameter * keep;
    }
    const float moment = multiply_add<fma>(weight, gradient - m[i], from_moment ? m[i] : gradient);
    float square = blend<fma>(v[i], beta2, of_square * gradient, gradient, b.scalar);
    m[i] = moment;
    v[i] = square;
    if constexpr (amsgrad) {
      // [Note: scalar ends]: vectors keep NaN, std::max() does not.
      square = square > largest[i] || (square != square && !b.scalar) ? square : largest[i];
      largest[i] = square;
    }
    p[i] = parameter + step_size * moment / (__builtin_sqrtf(square) / bias2_sqrt + eps);
  }
  return not_finite;
}

template <bool fma, bool scales, bool decays, bool amsgrad>
ZEROPAGE_INLINE std::uint32_t adam_from(const AdamNumbers& a, const Block& b) {
  return a.from_moment ? adam_loop<fma, scales, decays, amsgrad, true>(a, b)
                       : adam_loop<fma, scales, decays, amsgrad, false>(a, b);
}

template <bool fma, bool scales>
ZEROPAGE_INLINE std::uint32_t adam(const Update& u, const AdamNumbers& a, const Block& b) {
  if (u.amsgrad)
    return a.decay != 0 ? adam_from<fma, scales, true, true>(a, b) : adam_from<fma, scales, false, true>(a, b);
  return a.decay != 0 ? adam_from<fma, scales, true, false>(a, b) : adam_from<fma, scales, false, false>(a, b);
}

/// Weight decay as a term of the gradient.
template <bool fma>
ZEROPAGE_INLINE void add_decay(const Update& u, const float* __restrict p, float* __restrict g, std::size_t n) {
  if (u.weight_decay == 0) return;
  const auto decay = static_cast<float>(u.weight_decay);
  for (std::size_t i = 0; i < n; ++i) g[i] = multiply_add<fma>(p[i], decay, g[i]);
}

template <bool fma>
ZEROPAGE_INLINE void sgd(const Update& u, const Block& b) {
  float* __restrict p = b.parameter;
  float* __restrict g = b.gradient;
  float* __restrict m = b.state[0];
  add_decay<fma>(u, p, g, b.n);
  if (u.momentum != 0) {
    const auto momentum = static_cast<float>(u.momentum), damped = static_cast<float>(1 - u.dampening);
    if (u.first_momentum) {
      for (std::size_t i = 0; i < b.n; ++i) m[i] = g[i];
    } else {
      for (std::size_t i = 0; i < b.n; ++i) m[i] = blend<fma>(m[i], momentum, g[i], damped, b.scalar);
    }
    if (u.nesterov) {
      for (std::size_t i = 0; i < b.n; ++i) g[i] = multiply_add<fma>(m[i], momentum, g[i]);
    } else {
      for (std::size_t i = 0; i < b.n; ++i) g[i] = m[i];
    }
  }
  const auto rate = static_cast<float>(-u.lr);
  for (std::size_t i = 0; i < b.n; ++i) p[i] = multiply_add<fma>(g[i], rate, p[i]);
}

/// Adagrad (Duchi et al., 2011).
template <bool fma>
ZEROPAGE_INLINE void adagrad(const Update& u, const Block& b) {
  float* __restrict p = b.parameter;
  float* __restrict g = b.gradient;
  float* __restrict sum = b.state[0];
  add_decay<fma>(u, p, g, b.n);
  const auto rate = static_cast<float>(u.lr / (1 + (u.step - 1) * u.lr_decay)), eps = static_cast<float>(u.eps);
  for (std::size_t i = 0; i < b.n; ++i) {
    sum[i] = multiply_add<fma>(g[i], g[i], sum[i]);
    p[i] = p[i] - rate * g[i] / (__builtin_sqrtf(sum[i]) + eps);
  }
}

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2).
template <bool fma>
ZEROPAGE_INLINE void lion(const Update& u, const Block& b) {
  float* __restrict p = b.parameter;
  float* __restrict g = b.gradient;
  float* __restrict m = b.state[0];
  const auto keep = static_cast<float>(1 - u.lr * u.weight_decay), rate = static_cast<float>(u.lr);
  const auto beta1 = static_cast<float>(u.beta1), beta2 = static_cast<float>(u.beta2);
  const auto rest1 = static_cast<float>(1 - u.beta1), rest2 = static_cast<float>(1 - u.beta2);
  for (std::size_t i = 0; i < b.n; ++i) {
    const float direction = multiply_add<fma>(m[i], beta1, rest1 * g[i]);
    const float sign = direction > 0 ? rate : direction < 0 ? -rate : direction != direction ? direction : 0.0f;
    p[i] = p[i] * keep - sign;
    m[i] = multiply_add<fma>(m[i], beta2, rest2 * g[i]);
  }
}

bool is_float(const Array& array) { return array.format == Format::float32 || array.format == Format::none; }

/// The array from which the gradient is read.
const Array& read_gradient(const Arrays& arrays) {
  return arrays.narrow_gradient.format == Format::none ? arrays.gradient : arrays.narrow_gradient;
}

/// Whether all arrays except the gradient's are float32 and the gradient is not stored: Adam then works on the arrays
/// themselves.
bool is_adam_in_place(const Update& u, const Arrays& arrays, const AdamNumbers& numbers) {
  return (u.rule == Rule::adam || u.rule == Rule::adamw) && numbers.simple && !u.store_gradient &&
         is_float(arrays.parameter) && is_float(arrays.state[0]) && is_float(arrays.state[1]) &&
         is_float(arrays.state[2]);
}

ZEROPAGE_INLINE Block part_of(const Block& b, std::size_t from, std::size_t to, bool scalar) {
  Block part{b.parameter + from, b.gradient + from, {}, to - from, scalar};
  for (int s = 0; s < 3; ++s) part.state[s] = b.state[s] ? b.state[s] + from : nullptr;
  return part;
}

template <bool fma>
ZEROPAGE_INLINE void apply(const Update& u, const AdamNumbers& numbers, const Block& b) {
  switch (u.rule) {
    case Rule::adam:
    case Rule::adamw:
      adam<fma, false>(u, numbers, b);
      break;
    case Rule::sgd:
      sgd<fma>(u, b);
      break;
    case Rule::adagrad:
      adagrad<fma>(u, b);
      break;
    case Rule::lion:
      lion<fma>(u, b);
      break;
  }
}

/// Computes the elements from `vectors_end` on as [Note: scalar ends] says.
template <bool fma>
ZEROPAGE_INLINE std::size_t run_blocks(const Update& u, const Arrays& arrays, std::size_t begin, std::size_t end,
                                       std::size_t vectors_end) {
  constexpr std::size_t kStep = 8 * kBlock;  // `visible` is written while the block is in the first-level cache
  alignas(64) float all[kStep];
  float* const scratch[] = {all, all + kBlock, all + 2 * kBlock, all + 3 * kBlock, all + 4 * kBlock};
  std::size_t not_finite = 0;
  const AdamNumbers numbers(u);
  const Array& gradient = read_gradient(arrays);
  if (is_adam_in_place(u, arrays, numbers)) {
    for (std::size_t at = begin; at < end; at += kStep) {
      const std::size_t n = std::min(kStep, end - at);
      Block b{load(arrays.parameter, at, n, nullptr), load(gradient, at, n, all), {}, n, at >= vectors_end};
      for (int s = 0; s < 3; ++s) b.state[s] = load(arrays.state[s], at, n, nullptr);
      not_finite += adam<fma, true>(u, numbers, b);
      store(arrays.visible, at, n, b.parameter);
    }
    return not_finite;
  }
  // Works on a copy of a gradient that must not change.
  for (std::size_t at = begin; at < end; at += kBlock) {
    const std::size_t n = std::min(kBlock, end - at);
    Block b{load(arrays.parameter, at, n, scratch[0]), load(gradient, at, n, scratch[1]), {}, n, false};
    if (b.gradient != scratch[1]) {
      const float* __restrict from = b.gradient;
      for (std::size_t i = 0; i < n; ++i) scratch[1][i] = from[i];
      b.gradient = scratch[1];
    }
    for (int s = 0; s < 3; ++s) b.state[s] = load(arrays.state[s], at, n, scratch[2 + s]);
    not_finite += scale_gradient(u, b.gradient, n);
    if (u.store_gradient) store(arrays.gradient, at, n, b.gradient);
    if (u.maximize) {
      for (std::size_t i = 0; i < n; ++i) b.gradient[i] = -b.gradient[i];
    }
    for (std::size_t from = 0, to = 0; from < n; from = to) {
      const bool scalar = at + from >= vectors_end;
      to = scalar ? n : std::min(n, vectors_end - at);
      apply<fma>(u, numbers, part_of(b, from, to, scalar));
    }
    store(arrays.parameter, at, n, b.parameter);
    store(arrays.visible, at, n, b.parameter);
    for (int s = 0; s < 3; ++s) store(arrays.state[s], at, n, b.state[s]);
  }
  return not_finite;
}

/// [Note: scalar ends] At a tensor's end, PyTorch's kernels compute the elements after the last whole vector by
/// scalar code. There the compiler fused the other of two products with the addition. Its lerp from the gradient also
/// negates the factor, so that a factor of 0 is -0 and a moment of 0 gets another sign. This code does the same.
template <bool fma>
ZEROPAGE_INLINE std::size_t run(const Update& u, const Arrays& arrays, std::size_t begin, std::size_t end) {
  const auto has_blocks = [](const Array& a) {
    return a.format == Format::signed_blocks8 || a.format == Format::unsigned_blocks8;
  };
  // A block has one scale and must not be split.
  const bool whole = std::any_of(std::begin(arrays.state), std::end(arrays.state), has_blocks);
  const std::size_t vectors_end = begin + (end - begin) / u.vector * u.vector;
  const std::size_t first_end = whole ? end : vectors_end;
  std::size_t not_finite = run_blocks<fma>(u, arrays, begin, first_end, vectors_end);
  if (first_end < end) not_finite += run_blocks<fma>(u, arrays, first_end, end, vectors_end);
  return not_finite;
}

ZEROPAGE_INLINE void decode_all(const Array& array, std::size_t begin, std::size_t end, float* to) {
  for (std::size_t at = begin; at < end; at += kBlock) {
    const std::size_t n = std::min(kBlock, end - at);
    float* const floats = load(array, at, n, to + (at - begin));
    if (floats != to + (at - begin)) std::copy(floats, floats + n, to + (at - begin));
  }
}

ZEROPAGE_INLINE void encode_all(const Array& array, std::size_t begin, std::size_t end, const float* from) {
  for (std::size_t at = begin; at < end; at += kBlock) {
    store(array, at, std::min(kBlock, end - at), from + (at - begin));
  }
}

/// Each entry point, compiled for one instruction set.
#define ZEROPAGE_FOR_TARGET(name, target, fma)                                                               \
  struct name {                                                                                              \
    target static std::size_t update(const Update& u, const Arrays& a, std::size_t begin, std::size_t end) { \
      return run<fma>(u, a, begin, end);                                                                     \
    }                                                                                                        \
    target static void decode(const Array& array, std::size_t begin, std::size_t end, float* to) {           \
      decode_all(array, begin, end, to);                                                                     \
    }                                                                                                        \
    target static void encode(const Array& array, std::size_t begin, std::size_t end, const float* from) {   \
      encode_all(array, begin, end, from);                                                                   \
    }                                                                                                        \
  };

ZEROPAGE_FOR_TARGET(Baseline, , kBaselineHasFma)
#if defined(__x86_64__)
ZEROPAGE_FOR_TARGET(Avx2, [[gnu::target("avx2,fma,f16c")]], true)
ZEROPAGE_FOR_TARGET(Avx512,
                    [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")]], true)
#endif
#undef ZEROPAGE_FOR_TARGET

struct Chosen {
  decltype(&Baseline::update) update;
  decltype(&Baseline::decode) decode;
  decltype(&Baseline::encode) encode;
  std::string_view name;
};

template <class Target>
Chosen entries_of(std::string_view name) {
  return {&Target::update, &Target::decode, &Target::encode, name};
}

Chosen choose() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return entries_of<Avx512>("avx512");
  }
  if (avx2) return entries_of<Avx2>("avx2");
#endif
  return entries_of<Baseline>("baseline");
}

const Chosen& chosen() {
  static const Chosen once = choose();
  return once;
}

}  // namespace

std::size_t update(const Update& update, const Arrays& arrays, std::size_t begin, std::size_t end) {
  return chosen().update(update, arrays, begin, end);
}

void decode(const Array& array, std::size_t begin, std::size_t end, float* to) {
  chosen().decode(array, begin, end, to);
}

void encode(const Array& array, std::size_t begin, std::size_t end, const float* from) {
  chosen().encode(array, begin, end, from);
}

std::string_view instruction_set() { return chosen().name; }

}  // namespace zeropage::kernels
