#include <ATen/Context.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/json.h"
#include "zeropage/checkpoint/checkpoint.h"
#include "zeropage/checkpoint/file_layout.h"
#include "zeropage/checkpoint/module_tensors.h"
#include "zeropage/checkpoint/open_checkpoint.h"
#include "zeropage/checkpoint/optimizer_fields.h"
#include "zeropage/checkpoint/rank_talk.h"
#include "zeropage/space/frontend.h"
#include "zeropage/space/space.h"

namespace zeropage {
namespace {

constexpr std::size_t kMostListed = 8;  // differences in one error

/// Differences between a checkpoint and the objects to load into.
class Differences {
 public:
  void add(std::string difference) { all_.push_back(std::move(difference)); }

  void raise(const std::filesystem::path& path) const {
    if (all_.empty()) return;
    const std::vector<std::string> first(all_.begin(), all_.begin() + std::min(all_.size(), kMostListed));
    const std::string rest = all_.size() > kMostListed ? fmt::format("; and {} more", all_.size() - kMostListed) : "";
    throw Error(fmt::format("\"{}\" does not fit these objects, and nothing was loaded: {}{}", path.string(),
                            fmt::join(first, "; "), rest));
  }

  /// Compares a stored tensor with the one to load into.
  void compare(const Stored& stored, const std::string& name, const at::Tensor& into, c10::ScalarType dtype) {
    if (into.sizes() != c10::IntArrayRef(stored.sizes)) {
      add(fmt::format("\"{}\" is [{}] there and [{}] here", name, fmt::join(stored.sizes, ", "),
                      fmt::join(into.sizes(), ", ")));
    }
    const bool converts = c10::isFloatingType(dtype) && !c10::isComplexType(stored.dtype);
    if (dtype != stored.dtype && !converts) {
      add(fmt::format("\"{}\" is {} there and {} here", name, name_of_dtype(stored.dtype), c10::toString(dtype)));
    }
  }

 private:
  std::vector<std::string> all_;
};

/// A tensor of the module and its place in the checkpoint.
struct ModuleRead {
  const Stored* stored;
  at::Tensor into;
};

std::vector<ModuleRead> plan_module(const Checkpoint& checkpoint, std::vector<NamedTensor> wanted,
                                    Differences& differences) {
  std::set<std::string> unused = checkpoint.names("model");
  for (const auto& [name, _] : checkpoint.aliases()) unused.insert(name);
  const auto is_alias = [&](const NamedTensor& named) { return checkpoint.aliases().contains(named.name); };
  std::ranges::stable_partition(wanted, [&](const NamedTensor& named) { return !is_alias(named); });
  std::vector<ModuleRead> reads;
  std::set<std::string> done;
  for (const NamedTensor& named : wanted) {
    unused.erase(named.name);
    const std::string& written = is_alias(named) ? checkpoint.aliases().at(named.name) : named.name;
    const Stored* stored = checkpoint.find("master", written);
    if (!stored) stored = checkpoint.find("model", written);
    if (!stored) {
      differences.add(fmt::format("it lacks \"{}\"", named.name));
      continue;
    }
    differences.compare(*stored, named.name, named.tensor, named.tensor.scalar_type());
    if (done.insert(identity(named.tensor)).second) reads.push_back({stored, named.tensor});
  }
  for (const std::string& name : unused) differences.add(fmt::format("its \"{}\" is not in this module", name));
  std::ranges::sort(reads, {},
                    [](const ModuleRead& read) { return std::tuple(read.stored->file, read.stored->offset); });
  return reads;
}

/// A state to load for one parameter.
struct StateRead {
  const void* impl;  // of the parameter: the optimizer's key
  at::Tensor parameter;
  std::unique_ptr<torch::optim::OptimizerParamState> state;
  std::vector<std::pair<at::Tensor*, const Stored*>> tensors;  // of the state
};

/// The checked options and states to load into an optimizer.
class OptimizerPlan {
 public:
  OptimizerPlan(Checkpoint& checkpoint, const std::vector<NamedTensor>& module, torch::optim::Optimizer& optimizer,
                Differences& differences)
      : checkpoint_(checkpoint), optimizer_(optimizer), kind_(kind_of(optimizer)), differences_(differences) {
    const Json& held = checkpoint.body().at("optimizer");
    if (held.is_null()) {
      differences.add("it holds no optimizer: save one with it, or load without");
      return;
    }
    const auto names = names_of_parameters(module, optimizer);
    if (!choose_settings(names, held.at("groups").array())) {
      differences.add(
          "its optimizer has other groups of parameters: build the optimizer with the same parameters in the same "
          "groups");
      return;
    }
    std::map<std::string_view, const Json*> states;
    for (const auto& [name, state] : held.at("states").object()) states[name] = &state;
    for (std::size_t i = 0; i < names.size(); ++i) {
      const auto& group = optimizer.param_groups()[i];
      const auto options = group.options().clone();
      if (settings_[i]) apply(*settings_[i], *options, fmt::format("group {}", i));
      for (std::size_t j = 0; j < names[i].size(); ++j) {
        const auto found = states.find(names[i][j]);
        if (found != states.end()) {
          add_state(names[i][j], group.params()[j], *found->second, *options);
        } else if (kind_.starts_with_states) {
          differences.add(fmt::format("it lacks the optimizer state of \"{}\"", names[i][j]));
        }
      }
    }
  }

  /// Replaces the optimizer's options and states. Over ranks, all ranks call it.
  void load(c10::function_ref<void(const Stored&, const at::Tensor&)> read) {
    optimizer_.state().clear();  // frees its pages for the loaded state
    for (StateRead& one : states_) {
      const at::Tensor parameter = one.parameter.detach();
      const bool floats = parameter.is_floating_point();
      const auto dtype = floats ? dtype_of_states(parameter) : parameter.scalar_type();
      for (auto& [into, stored] : one.tensors) {
        // As the optimizer's step would make it: paged, if the parameter is.
        *into = at::zeros_like(parameter, parameter.options().dtype(dtype), c10::MemoryFormat::Preserve);
        read(*stored, *into);
      }
      optimizer_.state()[const_cast<void*>(one.impl)] = std::move(one.state);
    }
    for (std::size_t i = 0; i < settings_.size(); ++i) {
      if (settings_[i]) apply(*settings_[i], optimizer_.param_groups()[i].options(), "");
    }
  }

 private:
  /// Finds the saved settings of each group, or nothing for a group without any. Other libraries omit untrained
  /// parameters, and join groups. False if a group's parameters were saved with different settings, or differ.
  bool choose_settings(const std::vector<std::vector<std::string>>& names, const Json::Array& saved) {
    std::map<std::string, const Json*> settings_of;
    std::vector<std::set<std::string>> members(saved.size());
    for (std::size_t i = 0; i < saved.size(); ++i) {
      for (const Json& name : saved[i].at("params").array()) {
        settings_of[name.text()] = &saved[i].at("settings");
        members[i].insert(name.text());
      }
    }
    bool same = saved.size() == names.size();
    for (std::size_t i = 0; same && i < names.size(); ++i) {
      same = members[i] == std::set<std::string>(names[i].begin(), names[i].end());
      settings_.push_back(&saved[i].at("settings"));
    }
    if (same) return true;
    settings_.clear();
    std::size_t used = 0;
    for (std::size_t i = 0; i < names.size(); ++i) {
      const Json* settings = nullptr;
      for (std::size_t j = 0; j < names[i].size(); ++j) {
        const auto found = settings_of.find(names[i][j]);
        const bool is_trained = optimizer_.param_groups()[i].params()[j].requires_grad();
        if (found == settings_of.end() && is_trained) return false;
        if (found == settings_of.end()) continue;
        if (settings && settings->dump() != found->second->dump()) return false;
        settings = found->second;
        ++used;
      }
      settings_.push_back(settings);
    }
    return used == settings_of.size();
  }

  double number_of(const Json& value) {
    const Json* const name = value.is_object() ? value.find("$tensor") : nullptr;
    if (!name) return value.number();
    const Stored* const stored = checkpoint_.find("optimizer", name->text());
    if (!stored) throw JsonError("a tensor is missing");
    return checkpoint_.read(*stored).item<double>();
  }

  void set(const OptionField& field, const Json& value) {
    if (auto* const* number = std::get_if<double*>(&field.value)) {
      **number = number_of(value);
    } else if (auto* const* flag = std::get_if<bool*>(&field.value)) {
      **flag = value.flag();
    } else {
      const Json* const tuple = value.is_object() ? value.find("$tuple") : &value;
      if (!tuple || tuple->array().size() != 2) throw JsonError("a value is not a pair of numbers");
      *std::get<std::tuple<double, double>*>(field.value) = {number_of(tuple->array()[0]),
                                                             number_of(tuple->array()[1])};
    }
  }

  /// Changes the options. Keys that C++ does not know are ignored, and those that are missing stay.
  void apply(const Json& settings, torch::optim::OptimizerOptions& options, const std::string& where) {
    for (const OptionField& field : kind_.options_of(options)) {
      const Json* const value = settings.find(field.name);
      if (!value) continue;
      try {
        set(field, *value);
      } catch (const JsonError& error) {
        differences_.add(fmt::format("\"{}\" of {} of its optimizer: {}", field.name, where, error.what()));
      }
    }
    for (const auto& [name, ours] : kind_.fixed) {
      const Json* const value = settings.find(name);
      if (!value || !value->is_flag() || value->flag() == ours) continue;
      differences_.add(fmt::format("\"{}\" of {} of its optimizer is {}, and torch::optim::{} can only be {}", name,
                                   where, !ours, kind_.name, ours));
    }
  }

  void add_state(const std::string& name, const at::Tensor& parameter, const Json& saved,
                 const torch::optim::OptimizerOptions& options) {
    StateRead read{parameter.unsafeGetTensorImpl(), parameter, kind_.make_state(), {}};
    bool is_empty = false;
    for (const StateField& field : kind_.state_of(*read.state, options)) {
      const Json* const value = saved.find(field.name);
      if (value && value->is_null()) is_empty |= field.is_needed;  // SGD without momentum
      if (!value && field.is_needed) {
        differences_.add(fmt::format("the optimizer state of \"{}\" lacks \"{}\", which torch::optim::{} needs", name,
                                     field.name, kind_.name));
      }
      if (!value || value->is_null()) continue;
      if (auto* const* step = std::get_if<std::int64_t*>(&field.value)) {
        **step = std::llround(number_of(*value));
        continue;
      }
      const Stored* const stored = checkpoint_.find("optimizer", value->at("$tensor").text());
      if (!stored) throw JsonError("a tensor is missing");
      differences_.compare(*stored, stored->name, parameter, parameter.scalar_type());
      read.tensors.emplace_back(std::get<at::Tensor*>(field.value), stored);
    }
    if (!is_empty) states_.push_back(std::move(read));
  }

  Checkpoint& checkpoint_;
  torch::optim::Optimizer& optimizer_;
  const OptimizerKind& kind_;
  Differences& differences_;
  std::vector<const Json*> settings_;  // by group; null: it keeps its own
  std::vector<StateRead> states_;
};

/// The saved states of this rank's generators. A rank that did not save has none.
std::vector<std::pair<c10::Device, at::Tensor>> random_states(Checkpoint& checkpoint, int rank) {
  std::vector<std::pair<c10::Device, at::Tensor>> states;
  const Json::Array& everyones = checkpoint.body().at("ranks").array();
  if (static_cast<std::size_t>(rank) >= everyones.size()) return states;
  const Json* const random = everyones[static_cast<std::size_t>(rank)].find("random");
  for (const auto& [name, device] : generators()) {
    const Json* const saved = random ? random->find(name) : nullptr;
    const Stored* const stored = saved ? checkpoint.find("state", saved->at("$tensor").text()) : nullptr;
    if (stored) states.emplace_back(device, checkpoint.read(*stored));
  }
  return states;
}

void restore(const std::vector<std::pair<c10::Device, at::Tensor>>& states) {
  for (const auto& [device, state] : states) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

void load_all(const std::filesystem::path& folder, const torch::nn::Module& module,
              torch::optim::Optimizer* optimizer, const LoadOptions& options) {
  const Booking booking(&BookedTime::of_no_space(), Spent::checkpoint);
  const c10::NoGradGuard no_grad;
  const OutsideScopes ordinary;
  const std::vector<NamedTensor> tensors = tensors_of(module);
  RankTalk talk(all_of(tensors, optimizer));
  std::string found;
  talk.together([&] {
    if (talk.is_first()) found = find_checkpoint(folder).string();
  });
  const std::filesystem::path path = talk.of_first(found);
  std::optional<Checkpoint> checkpoint;
  std::vector<ModuleRead> reads;
  std::optional<OptimizerPlan> plan;
  Differences differences;
  talk.together([&] {
    checkpoint.emplace(path);
    reads = plan_module(*checkpoint, tensors, differences);
    try {
      if (optimizer) plan.emplace(*checkpoint, tensors, *optimizer, differences);
    } catch (const JsonError& error) {
      throw Error(fmt::format("\"{}\" holds an optimizer that C++ cannot read: {}", path.string(), error.what()));
    }
    checkpoint->raise();
    differences.raise(path);
  });
  const std::vector<std::string> crcs = talk.gather(std::to_string(checkpoint->manifest().crc));
  if (std::ranges::any_of(crcs, [&](const std::string& crc) { return crc != crcs[0]; })) {
    throw RankError(
        fmt::format("ranks do not see the same \"{}\": it must be one folder for all of them", path.string()));
  }
  std::vector<std::pair<c10::Device, at::Tensor>> random;
  talk.together([&] {
    std::uint64_t done = 0;
    const auto read = [&](const Stored& stored, const at::Tensor& into) {
      checkpoint->read(stored, into);
      for (const Piece& piece : stored.pieces) done += piece.bytes;
      if (options.progress) checkpoint->keep([&] { options.progress(done, checkpoint->size()); });
    };
    for (const ModuleRead& one : reads) read(*one.stored, one.into);
    if (plan) plan->load(read);
    random = random_states(*checkpoint, talk.rank());
    checkpoint->raise();
  });
  if (optimizer) continue_run(checkpoint->manifest().run);
  if (options.restore_rng) restore(random);
}

}  // namespace

void load(const std::filesystem::path& folder, torch::nn::Module& module, const LoadOptions& options) {
  load_all(folder, module, nullptr, options);
}

void load(const std::filesystem::path& folder, torch::nn::Module& module, torch::optim::Optimizer& optimizer,
          const LoadOptions& options) {
  load_all(folder, module, &optimizer, options);
}

}  // namespace zeropage
