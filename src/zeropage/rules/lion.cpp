// The Lion optimizer's update as the operator zeropage::_fused_lion_, because torch has none. On paged tensors it is
// deferred like torch's fused updates. This file implements it for ordinary tensors.
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/sign.h>
#include <torch/library.h>

#include "zeropage/base/errors.h"
#include "zeropage/kernels/update.h"

namespace zeropage {
namespace {

struct LionSettings {
  double lr, beta1, beta2, weight_decay;
  bool maximize;
};

bool fits_kernel(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_non_overlapping_and_dense() &&
         tensor.strides() == like.strides();
}

void run_kernel(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& moment,
                const LionSettings& s) {
  kernels::Update update;
  update.rule = kernels::Rule::lion;
  update.lr = s.lr, update.weight_decay = s.weight_decay;
  update.beta1 = s.beta1, update.beta2 = s.beta2;
  update.maximize = s.maximize;
  const auto floats = [](const at::Tensor& tensor) {
    return kernels::Array{kernels::Format::float32, tensor.mutable_data_ptr(), nullptr};
  };
  const kernels::Arrays arrays{floats(parameter), floats(gradient), {}, {floats(moment)}};
  at::parallel_for(0, parameter.numel(), at::internal::GRAIN_SIZE,
                   [&](std::int64_t begin, std::int64_t end) { kernels::update(update, arrays, begin, end); });
}

/// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
void run_general(at::Tensor parameter, at::Tensor gradient, at::Tensor moment, const LionSettings& s) {
  if (s.maximize) gradient = gradient.neg();
  const at::Tensor direction = moment.mul(s.beta1).add_(gradient, 1 - s.beta1).sign_();
  parameter.mul_(1 - s.lr * s.weight_decay).add_(direction, -s.lr);
  moment.mul_(s.beta2).add_(gradient, 1 - s.beta2);
}

void fused_lion(at::TensorList parameters, at::TensorList gradients, at::TensorList moments, double lr, double beta1,
                double beta2, double weight_decay, bool maximize) {
  if (gradients.size() != parameters.size() || moments.size() != parameters.size()) {
    throw ConfigError("_fused_lion_ needs as many gradients and moments as parameters");
  }
  const LionSettings settings{lr, beta1, beta2, weight_decay, maximize};
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& p = parameters[i];
    const bool all_fit = fits_kernel(p, p) && fits_kernel(gradients[i], p) && fits_kernel(moments[i], p);
    all_fit ? run_kernel(p, gradients[i], moments[i], settings) : run_general(p, gradients[i], moments[i], settings);
  }
}

}  // namespace
}  // namespace zeropage

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  library.def(
      "_fused_lion_(Tensor(a!)[] self, Tensor[] grads, Tensor(b!)[] exp_avgs, *, float lr, float beta1, float beta2, "
      "float weight_decay, bool maximize) -> ()");
}

TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("_fused_lion_", &zeropage::fused_lion);
}
