#include "zeropage/checkpoint/optimizer_fields.h"

#include <cxxabi.h>
#include <fmt/format.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdlib>
#include <typeinfo>

#include "zeropage/base/errors.h"

namespace zeropage {
namespace {

namespace optim = torch::optim;
using Options = std::vector<OptionField>;
using State = std::vector<StateField>;

template <class AdamOptions>
Options options_of_adam(AdamOptions& options) {
  return {{"lr", &options.lr()},
          {"betas", &options.betas()},
          {"eps", &options.eps()},
          {"weight_decay", &options.weight_decay()},
          {"amsgrad", &options.amsgrad()}};
}
template <class AdamState, class AdamOptions>
State state_of_adam(AdamState& state, const AdamOptions& options) {
  return {{"step", &state.step()},
          {"exp_avg", &state.exp_avg()},
          {"exp_avg_sq", &state.exp_avg_sq()},
          {"max_exp_avg_sq", &state.max_exp_avg_sq(), options.amsgrad()}};
}
Options fields_of(optim::AdamOptions& options) { return options_of_adam(options); }
Options fields_of(optim::AdamWOptions& options) { return options_of_adam(options); }
State fields_of(optim::AdamParamState& state, const optim::AdamOptions& options) {
  return state_of_adam(state, options);
}
State fields_of(optim::AdamWParamState& state, const optim::AdamWOptions& options) {
  return state_of_adam(state, options);
}

Options fields_of(optim::SGDOptions& options) {
  return {{"lr", &options.lr()},
          {"momentum", &options.momentum()},
          {"dampening", &options.dampening()},
          {"weight_decay", &options.weight_decay()},
          {"nesterov", &options.nesterov()}};
}
State fields_of(optim::SGDParamState& state, const optim::SGDOptions&) {
  return {{"momentum_buffer", &state.momentum_buffer()}};
}

Options fields_of(optim::RMSpropOptions& options) {
  return {{"lr", &options.lr()},   {"momentum", &options.momentum()}, {"alpha", &options.alpha()},
          {"eps", &options.eps()}, {"centered", &options.centered()}, {"weight_decay", &options.weight_decay()}};
}
State fields_of(optim::RMSpropParamState& state, const optim::RMSpropOptions& options) {
  return {{"step", &state.step()},
          {"square_avg", &state.square_avg()},
          {"momentum_buffer", &state.momentum_buffer(), options.momentum() > 0},
          {"grad_avg", &state.grad_avg(), options.centered()}};
}

Options fields_of(optim::AdagradOptions& options) {
  return {{"lr", &options.lr()},
          {"lr_decay", &options.lr_decay()},
          {"eps", &options.eps()},
          {"weight_decay", &options.weight_decay()},
          {"initial_accumulator_value", &options.initial_accumulator_value()}};
}
State fields_of(optim::AdagradParamState& state, const optim::AdagradOptions&) {
  return {{"step", &state.step()}, {"sum", &state.sum()}};
}

template <class KindOptions, class KindState>
OptimizerKind make_kind(const char* name, std::vector<std::pair<const char*, bool>> fixed, bool starts = false) {
  return {name,
          [](optim::OptimizerOptions& options) { return fields_of(static_cast<KindOptions&>(options)); },
          [](optim::OptimizerParamState& state, const optim::OptimizerOptions& options) {
            return fields_of(static_cast<KindState&>(state), static_cast<const KindOptions&>(options));
          },
          []() -> std::unique_ptr<optim::OptimizerParamState> { return std::make_unique<KindState>(); },
          std::move(fixed),
          starts};
}

template <class T>
bool is_a(const optim::Optimizer& optimizer) {
  return dynamic_cast<const T*>(&optimizer) != nullptr;
}

std::string type_name_of(const optim::Optimizer& optimizer) {
  const char* const mangled = typeid(optimizer).name();
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                                         &std::free);
  return text ? text.get() : mangled;
}

}  // namespace

const OptimizerKind& kind_of(const optim::Optimizer& optimizer) {
  static const OptimizerKind adamw = make_kind<optim::AdamWOptions, optim::AdamWParamState>(
      "AdamW", {{"maximize", false}, {"decoupled_weight_decay", true}});
  static const OptimizerKind adam = make_kind<optim::AdamOptions, optim::AdamParamState>(
      "Adam", {{"maximize", false}, {"decoupled_weight_decay", false}});
  static const OptimizerKind sgd = make_kind<optim::SGDOptions, optim::SGDParamState>("SGD", {{"maximize", false}});
  static const OptimizerKind rmsprop =
      make_kind<optim::RMSpropOptions, optim::RMSpropParamState>("RMSprop", {{"maximize", false}});
  static const OptimizerKind adagrad =
      make_kind<optim::AdagradOptions, optim::AdagradParamState>("Adagrad", {{"maximize", false}}, /*starts=*/true);
  if (is_a<optim::AdamW>(optimizer)) return adamw;
  if (is_a<optim::Adam>(optimizer)) return adam;
  if (is_a<optim::SGD>(optimizer)) return sgd;
  if (is_a<optim::RMSprop>(optimizer)) return rmsprop;
  if (is_a<optim::Adagrad>(optimizer)) return adagrad;
  throw Error(
      fmt::format("a checkpoint cannot hold a {}; it can hold torch::optim's AdamW, Adam, SGD, RMSprop and "
                  "Adagrad",
                  type_name_of(optimizer)));
}

}  // namespace zeropage
