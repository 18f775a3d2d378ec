#include "zeropage/checkpoint/module_tensors.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>

#include "zeropage/space/frontend.h"
#include "zeropage/space/space.h"

namespace zeropage {

std::vector<NamedTensor> tensors_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  for (const auto& held : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : held) {
      tensors.push_back({item.key(), item.value().detach(), item.value().unsafeGetTensorImpl()});
    }
  }
  return tensors;
}

std::vector<std::vector<std::string>> names_of_parameters(const std::vector<NamedTensor>& module,
                                                          const torch::optim::Optimizer& optimizer) {
  std::map<const void*, std::string> known;
  for (const NamedTensor& named : module) known.try_emplace(named.impl, named.name);
  std::vector<std::vector<std::string>> names;
  for (const auto& group : optimizer.param_groups()) {
    auto& members = names.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const auto found = known.find(parameter.unsafeGetTensorImpl());
      const std::string position = fmt::format("{}.{}", names.size() - 1, members.size());
      members.push_back(found == known.end() ? position : found->second);
    }
  }
  return names;
}

std::vector<at::Tensor> all_of(const std::vector<NamedTensor>& module, const torch::optim::Optimizer* optimizer) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& named : module) tensors.push_back(named.tensor);
  if (!optimizer) return tensors;
  for (const auto& group : optimizer->param_groups()) {
    tensors.insert(tensors.end(), group.params().begin(), group.params().end());
  }
  return tensors;
}

std::string identity(const at::Tensor& tensor) {
  const bool paged = is_paged(tensor);
  const auto place =
      paged ? virtual_address(tensor) : reinterpret_cast<std::uintptr_t>(tensor.storage().unsafeGetStorageImpl());
  return fmt::format("{} {} {} {} {} {}", paged, place, paged ? 0 : tensor.storage_offset(), tensor.sizes(),
                     tensor.strides(), c10::toString(tensor.scalar_type()));
}

std::vector<std::pair<std::string, c10::Device>> generators() {
  std::vector<std::pair<std::string, c10::Device>> found{{"torch", c10::kCPU}};
  if (!at::globalContext().hasCUDA()) return found;
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  if (cuda.deviceCount() > 0) found.emplace_back("cuda", cuda.getDevice());
  return found;
}

}  // namespace zeropage
