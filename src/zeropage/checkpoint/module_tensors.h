// The tensors of a module and its optimizer by the names of a checkpoint. Private to checkpoint/.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace zeropage {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;  // detached from autograd
  const void* impl;   // the original's TensorImpl: the optimizer's key
};

/// Parameters and buffers, by the names of Python's state_dict(). A tied tensor has several.
std::vector<NamedTensor> tensors_of(const torch::nn::Module& module);

/// The names of each group's parameters. A parameter outside the module is named by its position.
std::vector<std::vector<std::string>> names_of_parameters(const std::vector<NamedTensor>& module,
                                                          const torch::optim::Optimizer& optimizer);

/// All tensors that decide which ranks save together.
std::vector<at::Tensor> all_of(const std::vector<NamedTensor>& module, const torch::optim::Optimizer* optimizer);

/// Equal for tensors that are the same memory.
std::string identity(const at::Tensor& tensor);

/// torch's default generators by the names of a checkpoint, with the devices whose generators they are.
std::vector<std::pair<std::string, c10::Device>> generators();

}  // namespace zeropage
