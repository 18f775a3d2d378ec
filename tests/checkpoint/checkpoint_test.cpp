#include "zeropage/checkpoint/checkpoint.h"

#include <doctest/doctest.h>
#include <torch/torch.h>

#include <fstream>

#include "temporary_directory.h"
#include "zeropage/space/frontend.h"
#include "zeropage/zeropage.h"

using namespace zeropage;
namespace fs = std::filesystem;
namespace optim = torch::optim;

namespace {

std::shared_ptr<Space> make_disk_space(const TemporaryDirectory& directory,
                                       const std::string& compute_dtype = "auto") {
  return Space::make({.states = "disk",
                      .disk_path = directory.path(),
                      .device_memory = "4MB",
                      .host_memory = "4MB",
                      .compute_dtype = compute_dtype,
                      .device = "cpu",
                      .min_page_bytes = "1KB",
                      .page_size = "16KiB"});
}

torch::nn::Sequential make_module(const std::shared_ptr<Space>& space, std::int64_t width = 96) {
  torch::nn::Sequential module(torch::nn::Linear(40, width), torch::nn::BatchNorm1d(width), torch::nn::Dropout(0.2),
                               torch::nn::Linear(width, 40));
  if (space) space->page(module);
  return module;
}

std::vector<double> train(torch::nn::Sequential& module, optim::Optimizer& optimizer, int steps) {
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const auto x = torch::randn({8, 40});
    const auto loss = (module->forward(x) - x).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

bool are_equal(const torch::nn::Sequential& a, const torch::nn::Sequential& b) {
  const auto all = [](const torch::nn::Sequential& module) {
    std::vector<torch::Tensor> tensors = module->parameters();
    for (const auto& buffer : module->buffers()) tensors.push_back(buffer);
    return tensors;
  };
  const auto ours = all(a), theirs = all(b);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (!torch::equal(plain_copy(ours[i]), plain_copy(theirs[i]))) return false;
  }
  return ours.size() == theirs.size();
}

/// The most memory that the process has held since the last call, in bytes.
std::size_t peak_memory() {
  std::ifstream status("/proc/self/status");
  std::size_t peak = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) peak = std::stoull(line.substr(6)) * 1024;
  }
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins anew
  return peak;
}

void change_byte(const fs::path& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(at);
  file.put(byte);
}

}  // namespace

TEST_CASE("a resumed run equals the uninterrupted one, and stays paged") {
  TemporaryDirectory directory;
  const auto space = make_disk_space(directory);
  const std::string folder = directory.path() + "/runs/step-3";
  torch::manual_seed(0);
  auto module = make_module(space);
  optim::AdamW optimizer(module->parameters(), optim::AdamWOptions(1e-2).amsgrad(true));
  train(module, optimizer, 3);
  std::uint64_t done = 0, all = 0;
  save(folder, module, optimizer,
       {.progress = [&](std::uint64_t now, std::uint64_t size) { done = now, all = size; }});
  CHECK(done > 0);
  CHECK(done <= all);
  const auto losses = train(module, optimizer, 3);

  torch::manual_seed(1);
  auto again = make_module(space);
  optim::AdamW other(again->parameters(), optim::AdamWOptions(1.0));
  load(directory.path() + "/runs", again, other);  // the latest in it
  CHECK(static_cast<const optim::AdamWOptions&>(other.param_groups()[0].options()).lr() == 1e-2);
  const auto weight = again->parameters()[0];
  CHECK(is_paged(weight));
  const auto& state = static_cast<const optim::AdamWParamState&>(*other.state().at(weight.unsafeGetTensorImpl()));
  CHECK(state.step() == 3);
  CHECK(is_paged(state.exp_avg()));
  REQUIRE(kept(state.exp_avg()));
  CHECK(kept(state.exp_avg())->role == "optimizer");
  CHECK(kept(state.exp_avg())->tier == "disk");
  CHECK((train(again, other, 3) == losses));
  CHECK(are_equal(module, again));
}

TEST_CASE("a checkpoint passes through memory page by page") {
  TemporaryDirectory directory;
  const auto space = make_disk_space(directory);
  const auto make = [&] {
    torch::nn::Linear module(2048, 8192);  // 64 MB
    space->page(module);
    return module;
  };
  const auto module = make(), again = make();
  optim::SGD optimizer(module->parameters(), optim::SGDOptions(0.1).momentum(0.9));
  auto state = std::make_unique<optim::SGDParamState>();
  state->momentum_buffer(torch::zeros_like(module->weight).detach().uniform_());
  optimizer.state()[module->weight.unsafeGetTensorImpl()] = std::move(state);
  optim::SGD other(again->parameters(), optim::SGDOptions(0.1).momentum(0.9));
  space->synchronize();
  peak_memory();
  const std::size_t before = peak_memory();
  save(directory.path() + "/one", module, optimizer);
  load(directory.path() + "/one", again, other);
  CHECK(peak_memory() < before + (32 << 20));  // half a tensor
  for (const auto& budget : space->report().budgets) CHECK(budget.peak <= budget.limit);
  const auto& loaded = static_cast<optim::SGDParamState&>(*other.state().at(again->weight.unsafeGetTensorImpl()));
  const auto& saved = static_cast<optim::SGDParamState&>(*optimizer.state().at(module->weight.unsafeGetTensorImpl()));
  CHECK(torch::equal(plain_copy(loaded.momentum_buffer()), plain_copy(saved.momentum_buffer())));
  CHECK(torch::equal(plain_copy(again->weight), plain_copy(module->weight)));
}

TEST_CASE("a plain module loads the checkpoint of a paged one") {
  TemporaryDirectory directory;
  auto module = make_module(make_disk_space(directory));
  save(directory.path() + "/one/", module);
  auto plain = make_module(nullptr);
  load(directory.path() + "/one", *plain);
  CHECK(are_equal(module, plain));
  optim::SGD optimizer(plain->parameters(), optim::SGDOptions(0.1));
  CHECK_THROWS_WITH_AS(load(directory.path() + "/one", plain, optimizer), doctest::Contains("no optimizer"), Error);
}

TEST_CASE("in mixed precision a checkpoint holds the masters") {
  TemporaryDirectory directory;
  const auto space = make_disk_space(directory, "bfloat16");
  auto module = make_module(space);
  CHECK((module->parameters()[0].scalar_type() == at::kBFloat16));
  save(directory.path() + "/one", module);
  auto plain = make_module(nullptr);
  load(directory.path() + "/one", plain);
  CHECK(torch::equal(plain_copy(saved(module->parameters()[0])), plain->parameters()[0]));
  auto again = make_module(space);
  load(directory.path() + "/one", again);
  CHECK(are_equal(module, again));
  CHECK(torch::equal(plain_copy(saved(again->parameters()[0])), plain->parameters()[0]));
}

TEST_CASE("tied parameters are saved once") {
  TemporaryDirectory directory;
  const auto make = [&](const std::shared_ptr<Space>& space) {
    torch::nn::Linear shared(40, 40);
    torch::nn::Sequential module(shared, shared);
    if (space) space->page(module);
    return module;
  };
  auto module = make(make_disk_space(directory));
  save(directory.path() + "/one", module);
  CHECK(fs::file_size(directory.path() + "/one/model.safetensors") < 2 * 40 * 40 * sizeof(float) + 4096);
  auto plain = make(nullptr);
  load(directory.path() + "/one", plain);
  CHECK(are_equal(module, plain));
}

TEST_CASE("a checkpoint that does not fit names every difference and changes nothing") {
  TemporaryDirectory directory;
  const std::string folder = directory.path() + "/one";
  auto module = make_module(nullptr);
  optim::AdamW optimizer(module->parameters());
  train(module, optimizer, 1);
  save(folder, module, optimizer);
  auto wide = make_module(nullptr, 97);
  const auto before = plain_copy(wide->parameters()[0]);
  CHECK_THROWS_WITH_AS(load(folder, wide), doctest::Contains("\"0.weight\" is [96, 40] there and [97, 40] here"),
                       Error);
  CHECK(torch::equal(before, wide->parameters()[0]));
  torch::nn::Sequential short_one(torch::nn::Linear(40, 96));
  CHECK_THROWS_WITH_AS(load(folder, short_one), doctest::Contains("\"3.weight\" is not in this module"), Error);
  torch::nn::Sequential long_one(torch::nn::Linear(40, 96), torch::nn::BatchNorm1d(96), torch::nn::Linear(96, 96),
                                 torch::nn::Linear(96, 40));
  CHECK_THROWS_WITH_AS(load(folder, long_one), doctest::Contains("it lacks \"2.weight\""), Error);
  optim::SGD sgd(module->parameters(), optim::SGDOptions(0.1).momentum(0.5));
  CHECK_THROWS_WITH_AS(load(folder, module, sgd), doctest::Contains("lacks \"momentum_buffer\""), Error);
  optim::Adam adam(module->parameters());
  CHECK_THROWS_WITH_AS(load(folder, module, adam), doctest::Contains("\"decoupled_weight_decay\""), Error);
  optim::AdamW part({module->parameters()[0]});
  CHECK_THROWS_WITH_AS(load(folder, module, part), doctest::Contains("other groups of parameters"), Error);
  module->to(at::kDouble);  // floating dtypes are converted
  load(folder, module);
}

TEST_CASE("an optimizer of another kind is an error, and the earlier checkpoint stays") {
  TemporaryDirectory directory;
  const std::string folder = directory.path() + "/one";
  auto module = make_module(nullptr);
  save(folder, module);
  optim::LBFGS optimizer(module->parameters(), optim::LBFGSOptions(1));
  CHECK_THROWS_WITH_AS(save(folder, module, optimizer), doctest::Contains("torch::optim::LBFGS; it can hold"), Error);
  CHECK_THROWS_WITH_AS(load(folder, module, optimizer), doctest::Contains("AdamW, Adam, SGD"), Error);
  load(folder, module);
}

TEST_CASE("a save that fails leaves the earlier checkpoint and nothing else") {
  TemporaryDirectory directory;
  const fs::path folder = fs::path(directory.path()) / "one";
  auto module = make_module(nullptr);
  save(folder, module);
  const auto before = plain_copy(module->parameters()[0]).clone();
  torch::NoGradGuard no_grad;
  module->parameters()[0].zero_();
  const SaveOptions options{.progress = [](auto, auto) { throw std::runtime_error("no more"); }};
  CHECK_THROWS_WITH(save(folder, module, options), "no more");
  for (const auto& entry : fs::directory_iterator(directory.path())) CHECK((entry.path() == folder));
  load(folder, module);
  CHECK(torch::equal(module->parameters()[0], before));
}

TEST_CASE("a save replaces a checkpoint, keeps other files and refuses anything else") {
  TemporaryDirectory directory;
  const fs::path folder = fs::path(directory.path()) / "one";
  auto module = make_module(nullptr);
  save(folder, module);
  std::ofstream(folder / "tokenizer.json") << "{}";
  save(folder, module);
  CHECK(fs::exists(folder / "tokenizer.json"));
  for (const auto& entry : fs::directory_iterator(directory.path())) CHECK((entry.path() == folder));
  fs::create_directory(folder.parent_path() / "other");
  std::ofstream(folder.parent_path() / "other/notes") << "text";
  CHECK_THROWS_WITH_AS(save(folder.parent_path() / "other", module), doctest::Contains("is no checkpoint"), Error);
  CHECK_THROWS_WITH_AS(save(folder / "tokenizer.json", module), doctest::Contains("is a file"), Error);
  CHECK(fs::exists(folder.parent_path() / "other/notes"));
}

TEST_CASE("a changed byte is a DiskError that names the tensor or the file") {
  TemporaryDirectory directory;
  const fs::path folder = fs::path(directory.path()) / "one";
  auto module = make_module(nullptr);
  save(folder, module);
  change_byte(folder / "model.safetensors",
              static_cast<std::streamoff>(fs::file_size(folder / "model.safetensors")) - 1);
  CHECK_THROWS_WITH_AS(load(folder, module), doctest::Contains("is damaged: bytes"), DiskError);
  save(folder, module);
  change_byte(folder / "model.safetensors", 20);
  CHECK_THROWS_WITH_AS(load(folder, module), doctest::Contains("has a damaged header"), DiskError);
  save(folder, module);
  change_byte(folder / "zeropage-checkpoint.json", 200);
  CHECK_THROWS_WITH_AS(load(folder, module), doctest::Contains("is damaged"), DiskError);
  CHECK_THROWS_WITH_AS(load(directory.path() + "/none", module), doctest::Contains("holds none"), DiskError);
}

TEST_CASE("a folder that a dead process moved aside comes back") {
  TemporaryDirectory directory;
  const fs::path folder = fs::path(directory.path()) / "one";
  auto module = make_module(nullptr);
  save(folder, module);
  const fs::path aside = fs::path(directory.path()) / ".one.1-2-3-4-5.zeropage-partial.aside";
  fs::rename(folder, aside);
  fs::last_write_time(aside, fs::file_time_type::clock::now() - std::chrono::minutes(5));
  load(folder, module);
  CHECK(fs::exists(folder));
}
