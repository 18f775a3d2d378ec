#include "zeropage/checkpoint/saved_contents.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>

#include "zeropage/checkpoint/optimizer_fields.h"
#include "zeropage/io/checksum.h"
#include "zeropage/space/frontend.h"
#include "zeropage/space/space.h"

namespace zeropage {
namespace {

Json as_tensor(const std::string& name) { return Json::Object{{"$tensor", name}}; }

std::vector<Source> collect_module(const std::vector<NamedTensor>& module, Json::Object& aliases) {
  std::vector<Source> sources;
  std::map<std::string, std::string> kept;
  for (const NamedTensor& named : module) {
    const auto [first, is_new] = kept.try_emplace(identity(named.tensor), named.name);
    if (!is_new) {
      aliases.emplace_back(named.name, first->second);
      continue;
    }
    sources.push_back({named.name, named.tensor, dtype_of_states(named.tensor) != named.tensor.scalar_type()});
  }
  return sources;
}

Json settings_of(const OptimizerKind& kind, const torch::optim::OptimizerOptions& options) {
  Json::Object settings;
  const auto copy = options.clone();
  for (const OptionField& field : kind.options_of(*copy)) {
    if (const auto* number = std::get_if<double*>(&field.value)) {
      settings.emplace_back(field.name, **number);
    } else if (const auto* flag = std::get_if<bool*>(&field.value)) {
      settings.emplace_back(field.name, **flag);
    } else {
      const auto [first, second] = *std::get<std::tuple<double, double>*>(field.value);
      settings.emplace_back(field.name, Json::Object{{"$tuple", Json::Array{first, second}}});
    }
  }
  for (const auto& [name, value] : kind.fixed) settings.emplace_back(name, value);
  return settings;
}

/// The step as Python's optimizers count it.
at::Tensor count_of(std::int64_t step) {
  const bool is_exact = static_cast<std::int64_t>(static_cast<float>(step)) == step;
  return at::scalar_tensor(static_cast<double>(step), at::TensorOptions(is_exact ? c10::kFloat : c10::kDouble));
}

Json collect_optimizer(const std::vector<NamedTensor>& module, const torch::optim::Optimizer& optimizer,
                       std::vector<Source>& sources) {
  const OptimizerKind& kind = kind_of(optimizer);
  const auto names = names_of_parameters(module, optimizer);
  Json::Array groups;
  Json::Object states;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto& group = optimizer.param_groups()[i];
    groups.push_back(Json::Object{{"params", Json::Array(names[i].begin(), names[i].end())},
                                  {"settings", settings_of(kind, group.options())}});
    for (std::size_t j = 0; j < names[i].size(); ++j) {
      const auto found = optimizer.state().find(group.params()[j].unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      Json::Object state;
      const auto copy = found->second->clone();
      for (const StateField& field : kind.state_of(*copy, group.options())) {
        const auto* const step = std::get_if<std::int64_t*>(&field.value);
        const at::Tensor tensor = step ? count_of(**step) : *std::get<at::Tensor*>(field.value);
        if (!tensor.defined()) continue;
        sources.push_back({names[i][j] + "/" + field.name, tensor.detach()});
        state.emplace_back(field.name, as_tensor(sources.back().name));
      }
      states.emplace_back(names[i][j], std::move(state));
    }
  }
  return Json::Object{{"groups", std::move(groups)}, {"states", std::move(states)}};
}

/// The states of generators as text that ranks can send.
Json random_states() {
  Json::Object states;
  for (const auto& [name, device] : generators()) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state().contiguous();
    const auto* const data = state.const_data_ptr<std::uint8_t>();
    std::string digits;
    for (std::int64_t i = 0; i < state.numel(); ++i) digits += fmt::format("{:02x}", data[i]);
    states.emplace_back(name, std::move(digits));
  }
  return states;
}

at::Tensor bytes_of_digits(const std::string& digits) {
  const at::Tensor bytes = at::empty(static_cast<std::int64_t>(digits.size() / 2), at::TensorOptions(c10::kByte));
  for (std::size_t i = 0; i < digits.size() / 2; ++i) {
    bytes.mutable_data_ptr<std::uint8_t>()[i] =
        static_cast<std::uint8_t>(std::stoul(digits.substr(2 * i, 2), nullptr, 16));
  }
  return bytes;
}

}  // namespace

SavedContents SavedContents::of(const std::vector<NamedTensor>& module, const torch::optim::Optimizer* optimizer) {
  SavedContents contents;
  std::vector<Source> states;
  contents.add(files_of("model", collect_module(module, contents.aliases)));
  if (optimizer) contents.optimizer = collect_optimizer(module, *optimizer, states);
  contents.add(files_of("optimizer", states));
  return contents;
}

void SavedContents::add_rests(RankTalk& talk) {
  std::vector<Source> sources;
  const std::vector<std::string> everyones = talk.gather(random_states().dump());
  for (std::size_t rank = 0; rank < everyones.size(); ++rank) {
    Json::Object random;
    const Json states = Json::parse(everyones[rank]);
    for (const auto& [name, digits] : states.object()) {
      sources.push_back({fmt::format("{}/random/{}", rank, name), bytes_of_digits(digits.text())});
      random.emplace_back(name, as_tensor(sources.back().name));
    }
    rests.push_back(Json::Object{{"extra", Json::Object{}}, {"random", std::move(random)}});
  }
  add(files_of("state", sources));
}

std::uint64_t SavedContents::size() const {
  std::uint64_t bytes = 0;
  for (const FileLayout& file : files) bytes += file.size;
  return bytes;
}

std::uint32_t SavedContents::layout() const {
  std::uint32_t crc = 0;
  for (const FileLayout& file : files) crc = crc32(crc, std::as_bytes(std::span(file.header)));
  return crc;
}

void SavedContents::add(std::vector<FileLayout> more) {
  std::move(more.begin(), more.end(), std::back_inserter(files));
}

}  // namespace zeropage
