// The steps of libtorch's optimizers, which C++ programs call ([Note: interposition] in libtorch.cpp). A step
// averages gradients that the program has set, tells early updates its numbers, and ends pending updates if
// async_step is off.
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <map>
#include <mutex>

#include "zeropage/rules/speculation.h"
#include "zeropage/space/frontend.h"
#include "zeropage/space/space.h"
#include "zeropage/stock/of_torch.h"
#include "zeropage/tensor/paged_tensor.h"
#include "zeropage/train/gradients.h"

namespace zeropage {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

/// The settings of a group of parameters that enter an optimizer's arithmetic; 0 for those that it does not have.
struct Quantities {
  double lr = 0, decay = 0, beta1 = 0, beta2 = 0, lr_decay = 0, momentum = 0, dampening = 0, alpha = 0, step = 0;

  /// The numbers that torch::optim derives from them, in its order of operations. Their count is fixed.
  StepNumbers numbers() const {
    const double correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
    const double size = correction1 != 0 ? lr / correction1 : 0, cooled = lr / (1 + (step - 1) * lr_decay);
    return {lr,        -lr,       decay,    1 - lr * decay, step,        beta1,         beta2,
            1 - beta1, 1 - beta2, size,     -size,          correction1, correction2,   std::sqrt(correction2),
            cooled,    -cooled,   momentum, 1 - momentum,   dampening,   1 - dampening, alpha,
            1 - alpha};
  }
};

Quantities quantities_of(const torch::optim::AdamOptions& options) {
  const auto [beta1, beta2] = options.betas();
  return {.lr = options.lr(), .decay = options.weight_decay(), .beta1 = beta1, .beta2 = beta2};
}
Quantities quantities_of(const torch::optim::AdamWOptions& options) {
  const auto [beta1, beta2] = options.betas();
  return {.lr = options.lr(), .decay = options.weight_decay(), .beta1 = beta1, .beta2 = beta2};
}
Quantities quantities_of(const torch::optim::SGDOptions& options) {
  return {.lr = options.lr(),
          .decay = options.weight_decay(),
          .momentum = options.momentum(),
          .dampening = options.dampening()};
}
Quantities quantities_of(const torch::optim::RMSpropOptions& options) {
  return {
      .lr = options.lr(), .decay = options.weight_decay(), .momentum = options.momentum(), .alpha = options.alpha()};
}
Quantities quantities_of(const torch::optim::AdagradOptions& options) {
  return {.lr = options.lr(), .decay = options.weight_decay(), .lr_decay = options.lr_decay()};
}

/// The numbers of each group's next step. An optimizer may die unnoticed, so they are kept apart from it.
class NextNumbers {
 public:
  static NextNumbers& of_process() {
    static auto* const numbers = [] {
      auto* const made = new NextNumbers;
      set_next_numbers([made](std::int64_t key) { return made->find(key); });
      return made;
    }();
    return *numbers;
  }
  void set(std::int64_t key, StepNumbers numbers) {
    const std::lock_guard lock(mutex_);
    if (numbers_.size() >= kMost) numbers_.clear();
    numbers_.insert_or_assign(key, std::move(numbers));
  }

 private:
  static constexpr std::size_t kMost = 4096;
  StepNumbers find(std::int64_t key) {
    const std::lock_guard lock(mutex_);
    const auto known = numbers_.find(key);
    return known == numbers_.end() ? StepNumbers{} : known->second;
  }

  std::mutex mutex_;
  std::map<std::int64_t, StepNumbers> numbers_;
};

/// The steps that the group's parameters have taken; 1 if the optimizer does not count them.
template <class State>
double steps_of(Optimizer& optimizer, const OptimizerParamGroup& group) {
  if constexpr (requires(State& state) { state.step(); }) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) return static_cast<double>(static_cast<State&>(*found->second).step());
    }
  }
  return 1;
}

using Tensors = std::vector<at::Tensor*>;
template <class State>
Tensors tensors_of(State& state) {
  if constexpr (requires { state.exp_avg(); })
    return {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()};
  else if constexpr (requires { state.square_avg(); })
    return {&state.square_avg(), &state.momentum_buffer(), &state.grad_avg()};
  else if constexpr (requires { state.momentum_buffer(); })
    return {&state.momentum_buffer()};
  else
    return {&state.sum()};
}

/// Pages states of paged parameters that are ordinary, as after torch::load().
template <class State>
void page_states(Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    for (at::Tensor* const tensor : tensors_of(static_cast<State&>(*found->second))) {
      if (!tensor->defined() || is_paged(*tensor) || tensor->sizes() != parameter.sizes()) continue;
      page_tensor(segment_of(parameter)->domain(), *tensor, Role::optimizer);
    }
  }
}

template <class Options, class State>
void note(Optimizer& optimizer) {
  constexpr std::size_t kGroups = 64;  // of one optimizer that have keys of their own
  auto& groups = optimizer.param_groups();
  for (std::size_t i = 0; i < std::min(groups.size(), kGroups); ++i) {
    if (std::ranges::none_of(groups[i].params(), &is_paged)) continue;
    Quantities quantities = quantities_of(static_cast<const Options&>(groups[i].options()));
    quantities.step = steps_of<State>(optimizer, groups[i]);
    const auto key = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(&optimizer) * kGroups + i);
    note_step(groups[i].params(), key, quantities.numbers());
    ++quantities.step;
    NextNumbers::of_process().set(key, quantities.numbers());
  }
}

/// Runs torch's own step, `name`, on a program's optimizer.
template <class Kind, class Options, class State>
at::Tensor step(Kind& optimizer, Optimizer::LossClosure closure, const char* name) {
  using Steps = at::Tensor(Kind*, Optimizer::LossClosure);
  static auto* const torchs_step = of_torch<Steps>(name);  // one for each Kind
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    std::ranges::copy_if(group.params(), std::back_inserter(parameters), &is_paged);
  }
  if (parameters.empty()) return torchs_step(&optimizer, std::move(closure));
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();  // before gradients are averaged, as it makes them
  }
  before_step(parameters);
  page_states<State>(optimizer, parameters);
  {
    WidenedGradients gradients(parameters);
    (void)torchs_step(&optimizer, nullptr);
    gradients.narrow();
  }
  note<Options, State>(optimizer);
  step_ended(parameters);
  return loss;
}

}  // namespace
}  // namespace zeropage

// --- in place of libtorch's ---

namespace torch::optim {

at::Tensor Adam::step(LossClosure closure) {
  return zeropage::step<Adam, AdamOptions, AdamParamState>(*this, std::move(closure),
                                                           "_ZN5torch5optim4Adam4stepESt8functionIFN2at6TensorEvEE");
}
at::Tensor AdamW::step(LossClosure closure) {
  return zeropage::step<AdamW, AdamWOptions, AdamWParamState>(
      *this, std::move(closure), "_ZN5torch5optim5AdamW4stepESt8functionIFN2at6TensorEvEE");
}
at::Tensor SGD::step(LossClosure closure) {
  return zeropage::step<SGD, SGDOptions, SGDParamState>(*this, std::move(closure),
                                                        "_ZN5torch5optim3SGD4stepESt8functionIFN2at6TensorEvEE");
}
at::Tensor RMSprop::step(LossClosure closure) {
  return zeropage::step<RMSprop, RMSpropOptions, RMSpropParamState>(
      *this, std::move(closure), "_ZN5torch5optim7RMSprop4stepESt8functionIFN2at6TensorEvEE");
}
at::Tensor Adagrad::step(LossClosure closure) {
  return zeropage::step<Adagrad, AdagradOptions, AdagradParamState>(
      *this, std::move(closure), "_ZN5torch5optim7Adagrad4stepESt8functionIFN2at6TensorEvEE");
}

}  // namespace torch::optim
