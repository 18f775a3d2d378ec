// The options and states of torch::optim by the names that Python's optimizers give them. Private to checkpoint/.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace zeropage {

struct OptionField {
  const char* name;
  std::variant<double*, bool*, std::tuple<double, double>*> value;
};

struct StateField {
  const char* name;
  std::variant<std::int64_t*, at::Tensor*> value;
  bool is_needed = true;  // with the options at hand
};

/// A kind of optimizer.
struct OptimizerKind {
  const char* name;
  std::vector<OptionField> (*options_of)(torch::optim::OptimizerOptions&);
  std::vector<StateField> (*state_of)(torch::optim::OptimizerParamState&, const torch::optim::OptimizerOptions&);
  std::unique_ptr<torch::optim::OptimizerParamState> (*make_state)();
  /// Settings of Python that it cannot change, with the value that it acts on.
  std::vector<std::pair<const char*, bool>> fixed;
  bool starts_with_states = false;  // it has states before its first step, and needs them
};

/// Throws Error, with the known kinds, for another one.
const OptimizerKind& kind_of(const torch::optim::Optimizer& optimizer);

}  // namespace zeropage
