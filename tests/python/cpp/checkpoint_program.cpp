// The C++ side of test_cpp_checkpoint.py.
//
//   checkpoint_program train|load|resave|die FOLDER OPTIMIZER DUMP CONFIG
//   checkpoint_program report
//
// `train` trains and saves to FOLDER. `load` loads FOLDER. `resave` also saves to FOLDER-again. `die` dies while it
// saves. `report` prints a report. DUMP receives a dict of tensors for torch.load(). CONFIG is a file of settings.
// Under torchrun's variables it runs over ranks.
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>
#include <zeropage/comm/torchrun.h>
#include <zeropage/space/frontend.h>
#include <zeropage/zeropage.h>

#include <csignal>
#include <fstream>
#include <iostream>

namespace optim = torch::optim;
using Dump = c10::Dict<std::string, torch::Tensor>;

torch::nn::Sequential make_model(int seed, bool mixes) {
  torch::manual_seed(seed);
  torch::nn::Sequential model(torch::nn::Linear(40, 96));
  // On the CPU, BatchNorm takes no parameters of 16 bits with buffers of 32.
  if (mixes) {
    model->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({96})));
  } else {
    model->push_back(torch::nn::BatchNorm1d(96));
  }
  model->push_back(torch::nn::GELU());
  model->push_back(torch::nn::Linear(96, 40));
  return model;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& kind, torch::nn::Sequential& model) {
  const auto parameters = model->parameters();
  if (kind == "AdamW") return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions(3e-3).eps(1e-7));
  if (kind == "amsgrad") return std::make_unique<optim::Adam>(parameters, optim::AdamOptions(2e-3).amsgrad(true));
  if (kind == "SGD") return std::make_unique<optim::SGD>(parameters, optim::SGDOptions(0.1).momentum(0.9));
  if (kind == "plain SGD") return std::make_unique<optim::SGD>(parameters, optim::SGDOptions(0.1));
  if (kind == "RMSprop") {
    return std::make_unique<optim::RMSprop>(parameters, optim::RMSpropOptions(1e-2).momentum(0.5).centered(true));
  }
  if (kind == "Adagrad") return std::make_unique<optim::Adagrad>(parameters, optim::AdagradOptions(0.02));
  if (kind == "LBFGS") return std::make_unique<optim::LBFGS>(parameters, optim::LBFGSOptions(1));
  if (kind == "two groups") {
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector{parameters[0], parameters[2]}, std::make_unique<optim::AdamWOptions>(1e-3));
    groups.emplace_back(std::vector{parameters[1], parameters[3], parameters[4], parameters[5]},
                        std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(5e-3).weight_decay(0.5)));
    return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(3e-3));
  }
  throw std::runtime_error("no optimizer " + kind);
}

void train(torch::nn::Sequential& model, optim::Optimizer& optimizer, int steps, int rank) {
  for (int step = 0; step < steps; ++step) {
    const auto x = (torch::randn({8, 40}) + rank).to(model->parameters()[0].scalar_type());
    (model->forward(x) - x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

template <class State>
bool dump_state(Dump& dump, const std::string& name, const optim::OptimizerParamState& state,
                std::vector<std::pair<const char*, torch::Tensor (*)(const State&)>> fields) {
  const auto* const known = dynamic_cast<const State*>(&state);
  if (!known) return false;
  for (const auto& [field, of] : fields) {
    if (of(*known).defined()) dump.insert(name + "/" + field, zeropage::plain_copy(of(*known)));
  }
  return true;
}

void dump_state(Dump& dump, const std::string& name, const optim::OptimizerParamState& state) {
  using optim::AdamParamState, optim::AdamWParamState, optim::SGDParamState, optim::RMSpropParamState,
      optim::AdagradParamState;
  static const auto count = [](std::int64_t step) { return torch::tensor(step); };
  (void)(dump_state<AdamWParamState>(dump, name, state,
                                     {{"step", [](auto& s) { return count(s.step()); }},
                                      {"exp_avg", [](auto& s) { return s.exp_avg(); }},
                                      {"exp_avg_sq", [](auto& s) { return s.exp_avg_sq(); }}}) ||
         dump_state<AdamParamState>(dump, name, state,
                                    {{"step", [](auto& s) { return count(s.step()); }},
                                     {"exp_avg", [](auto& s) { return s.exp_avg(); }},
                                     {"exp_avg_sq", [](auto& s) { return s.exp_avg_sq(); }},
                                     {"max_exp_avg_sq", [](auto& s) { return s.max_exp_avg_sq(); }}}) ||
         dump_state<SGDParamState>(dump, name, state,
                                   {{"momentum_buffer", [](auto& s) { return s.momentum_buffer(); }}}) ||
         dump_state<RMSpropParamState>(dump, name, state,
                                       {{"step", [](auto& s) { return count(s.step()); }},
                                        {"square_avg", [](auto& s) { return s.square_avg(); }},
                                        {"momentum_buffer", [](auto& s) { return s.momentum_buffer(); }},
                                        {"grad_avg", [](auto& s) { return s.grad_avg(); }}}) ||
         dump_state<AdagradParamState>(
             dump, name, state,
             {{"step", [](auto& s) { return count(s.step()); }}, {"sum", [](auto& s) { return s.sum(); }}}));
}

// Everything that a checkpoint is to hold. Over ranks, all ranks call it.
void write_dump(const std::string& path, const torch::nn::Sequential& model, const optim::Optimizer& optimizer,
                int rank) {
  const torch::NoGradGuard no_grad;
  Dump dump;
  dump.insert("rng", at::globalContext().defaultGenerator(c10::kCPU).get_state());
  dump.insert("lr", torch::tensor(optimizer.param_groups()[0].options().get_lr(), torch::kFloat64));
  dump.insert("last lr", torch::tensor(optimizer.param_groups().back().options().get_lr(), torch::kFloat64));
  for (const auto& buffer : model->named_buffers()) {
    dump.insert("model/" + buffer.key(), zeropage::plain_copy(buffer.value()));
  }
  std::int64_t paged = 0;
  for (const auto& parameter : model->named_parameters()) {
    const auto& tensor = parameter.value();
    dump.insert("model/" + parameter.key(), zeropage::plain_copy(zeropage::saved(tensor)).detach());
    const auto state = optimizer.state().find(tensor.unsafeGetTensorImpl());
    if (state != optimizer.state().end()) dump_state(dump, parameter.key(), *state->second);
    paged += zeropage::is_paged(tensor);
  }
  dump.insert("paged", torch::tensor(paged));
  if (rank != 0) return;
  const std::vector<char> bytes = torch::jit::pickle_save(dump);
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void print_report() {
  zeropage::Report report{};
  report.homes = {{"parameter", "disk", 1'234'567'890, 2'000'000'000}, {"optimizer", "host", 0, 5}};
  report.budgets = {{"device_memory", 1, 2'500'000, 64'000'000}};
  report.faults = 1'234'567, report.evictions = 12, report.read_bytes = 987'654'321;
  report.written_bytes = 123'456'789'012, report.swap_bytes = 4096;
  report.waited_total = 12.345, report.waited_for_disk = 7.5, report.waited_for_memory = 2;
  report.waited_for_ranks = 1.5, report.update_seconds = 1234.5, report.copy_seconds = 0.001;
  report.ranks = 2, report.gathered_bytes = 1000, report.collectives = 1001;
  report.nonfinite_grads = 3, report.early_updates = 10, report.updates_committed = 9, report.wasted_bytes = 77'777;
  report.previews = 5;
  report.updated_in_host = 1'000'000, report.file_bytes = 1, report.io = "uring";
  report.unpaged_operators = {{"aten::a", 1}, {"aten::b", 20}, {"aten::c", 20}};
  report.seconds = 61.25, report.disk_endurance = 600'000'000'000;
  std::cout << report << "\n";
}

int main(int count, char** arguments) try {
  const std::vector<std::string> said(arguments + 1, arguments + count);
  if (said.at(0) == "report") return print_report(), 0;
  const std::string folder = said.at(1);
  const bool over_ranks = std::getenv("WORLD_SIZE") != nullptr;
  const auto group = over_ranks ? zeropage::torchrun_group() : nullptr;
  const int rank = over_ranks ? group->getRank() : 0;
  const auto space = zeropage::Space::make(zeropage::Config::from_file(said.at(4)), {.shard = group});
  const int seed = said[0] == "train" ? 0 : 1;
  torch::nn::Sequential model = make_model(seed, space->config().compute_dtype != "auto");
  space->page(model);
  const auto optimizer = make_optimizer(said.at(2), model);
  if (said[0] == "die") {
    zeropage::save(folder, model, {.progress = [](auto, auto) { std::raise(SIGKILL); }});
  } else if (said[0] == "train") {
    train(model, *optimizer, 3, rank);
    zeropage::save(folder, model, *optimizer);
  } else {
    zeropage::load(folder, model, *optimizer);
  }
  if (said[0] == "resave") zeropage::save(folder + "-again", model, *optimizer);
  write_dump(said.at(3), model, *optimizer, rank);
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
