// Stock libtorch on paged modules: archives, Module::to, set_data, TorchScript.
#include <doctest/doctest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "zeropage/space/frontend.h"
#include "zeropage/zeropage.h"

using namespace zeropage;

namespace {

struct Folder {
  std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("zeropage-stock-" + std::to_string(::getpid()));
  Folder() { std::filesystem::create_directories(path); }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file(const char* name) const { return path / name; }
};

std::shared_ptr<Space> make_space(const char* device_memory = "8MB", const char* host_memory = "4MB",
                                  const char* compute_dtype = "auto") {
  Config config;
  config.states = "disk";
  config.disk_path = "/var/tmp";
  config.device = "cpu";
  config.device_memory = device_memory;
  config.host_memory = host_memory;
  config.tiling = "exact";
  config.compute_dtype = compute_dtype;
  config.min_page_bytes = "4KB";
  return Space::make(config);
}

torch::nn::Sequential make_network() {
  return torch::nn::Sequential(torch::nn::Linear(256, 512), torch::nn::GELU(), torch::nn::Linear(512, 256),
                               torch::nn::BatchNorm1d(256));
}

void train(torch::nn::Sequential& model, torch::optim::Optimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    torch::manual_seed(step);
    const auto x = torch::randn({16, 256});
    (model->forward(x) - x).square().mean().backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
}

int paged(const std::vector<torch::Tensor>& tensors) {
  return static_cast<int>(std::ranges::count_if(tensors, [](const auto& tensor) { return is_paged(tensor); }));
}

int paged_states(const torch::optim::Optimizer& optimizer) {
  int count = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& adam = static_cast<const torch::optim::AdamWParamState&>(*state);
    count += is_paged(adam.exp_avg()) + is_paged(adam.exp_avg_sq());
  }
  return count;
}

bool are_equal(const torch::nn::Module& one, const torch::nn::Module& other) {
  const auto a = one.parameters(), b = other.parameters();
  bool same = a.size() == b.size();
  for (std::size_t i = 0; same && i < a.size(); ++i) same = torch::equal(a[i], b[i]);
  return same;
}

const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(0.1);

}  // namespace

TEST_CASE("stock archives of a paged module and its optimizer resume to the bit, and all stays paged") {
  const Folder folder;
  torch::manual_seed(1);
  auto plain = make_network();
  torch::optim::AdamW plain_optimizer(plain->parameters(), options);
  train(plain, plain_optimizer, 0, 6);

  const auto space = make_space();
  int parameters = 0, states = 0;
  {
    torch::manual_seed(1);
    auto model = [&] {
      const auto scope = space->enter();
      return make_network();
    }();
    torch::optim::AdamW optimizer(model->parameters(), options);
    train(model, optimizer, 0, 3);
    parameters = paged(model->parameters());
    states = paged_states(optimizer);
    torch::save(model, folder.file("model.pt"));
    torch::save(optimizer, folder.file("optimizer.pt"));
  }
  REQUIRE(parameters == 2);
  REQUIRE(states == 4);
  for (const bool in_scope : {false, true}) {
    CAPTURE(in_scope);
    torch::manual_seed(2);
    auto model = [&] {
      const auto scope = space->enter();
      return make_network();
    }();
    torch::optim::AdamW optimizer(model->parameters(), options);
    const auto load = [&] {
      torch::load(model, folder.file("model.pt"));
      torch::load(optimizer, folder.file("optimizer.pt"));
    };
    if (in_scope) {
      const auto scope = space->enter();
      load();
    } else {
      load();
    }
    CHECK(paged(model->parameters()) == parameters);
    train(model, optimizer, 3, 6);
    CHECK(paged(model->parameters()) == parameters);
    CHECK(paged_states(optimizer) == states);
    CHECK(are_equal(*plain, *model));
  }
  // A plain program reads what the paged one wrote.
  auto other = make_network();
  torch::optim::AdamW other_optimizer(other->parameters(), options);
  torch::load(other, folder.file("model.pt"));
  torch::load(other_optimizer, folder.file("optimizer.pt"));
  train(other, other_optimizer, 3, 6);
  CHECK(are_equal(*plain, *other));
}

TEST_CASE("a tensor larger than device_memory is saved and loaded by stock calls") {
  const Folder folder;
  const auto space = make_space();
  torch::Tensor large, loaded;
  {
    const auto scope = space->enter();
    large = torch::arange(6'000'000, torch::kFloat);
    loaded = torch::zeros({6'000'000});
  }
  REQUIRE(is_paged(large));
  torch::save(std::vector<torch::Tensor>{large, large.slice(0, 0, 10)}, folder.file("tensors.pt"));
  std::vector<torch::Tensor> plain;
  torch::load(plain, folder.file("tensors.pt"));
  CHECK(plain[0][5'999'999].item<float>() == 5'999'999);
  CHECK(plain[1].numel() == 10);
  loaded.set_data(plain[0]);
  plain.clear();
  CHECK(is_paged(loaded));
  CHECK(loaded.slice(0, 5'000'000, 5'100'000).sum().item<double>() ==
        large.slice(0, 5'000'000, 5'100'000).sum().item<double>());
}

TEST_CASE("an archive in float32 becomes masters under compute_dtype, and torch::save refuses to lose masters") {
  const Folder folder;
  torch::manual_seed(1);
  auto plain = make_network();
  torch::save(plain, folder.file("float32.pt"));
  const auto space = make_space("8MB", "4MB", "bfloat16");
  torch::nn::Sequential model;
  {
    const auto scope = space->enter();
    model = make_network();
  }
  torch::load(model, folder.file("float32.pt"));
  const auto parameters = model->parameters(), expected = plain->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    CAPTURE(i);
    CHECK((parameters[i].scalar_type() == torch::kBFloat16));
    CHECK(torch::equal(plain_copy(saved(parameters[i])), expected[i]));
  }
  CHECK_THROWS_WITH_AS(torch::save(model, folder.file("lost.pt")), doctest::Contains("zeropage::save"), Error);
}

TEST_CASE("states that an optimizer loads into a space in the host are paged at its next step") {
  const Folder folder;
  Config config;
  config.states = "host", config.device = "cpu", config.min_page_bytes = "4KB";
  config.device_memory = config.host_memory = "32MB";
  const auto space = Space::make(config);
  torch::nn::Sequential model;
  {
    const auto scope = space->enter();
    model = make_network();
  }
  torch::optim::AdamW optimizer(model->parameters(), options), loaded(model->parameters(), options);
  train(model, optimizer, 0, 1);
  torch::save(optimizer, folder.file("optimizer.pt"));
  torch::load(loaded, folder.file("optimizer.pt"));
  CHECK(paged_states(loaded) == 0);
  train(model, loaded, 1, 2);
  CHECK(paged_states(loaded) == 4);
}

TEST_CASE("Module::to and set_data keep tensors in their space") {
  const auto space = make_space();
  torch::nn::Sequential model;
  torch::manual_seed(1);
  {
    const auto scope = space->enter();
    model = make_network();
  }
  torch::manual_seed(1);
  auto plain = make_network();
  for (const auto dtype : {torch::kDouble, torch::kBFloat16, torch::kFloat}) {
    model->to(dtype);
    plain->to(dtype);
    CHECK(paged(model->parameters()) == 2);
    CHECK((model->parameters()[0].scalar_type() == dtype));
    CHECK(are_equal(*plain, *model));
  }
  auto weight = model->parameters()[0];
  const auto other = torch::ones({512, 256});
  weight.set_data(other);
  CHECK(is_paged(weight));
  other.fill_(3);  // they share their data, as without zeropage
  CHECK(weight.mean().item<double>() == 3);
  const auto shared = torch::ones({512, 256});
  const auto view = shared.view({-1});
  weight.set_data(shared);
  CHECK_FALSE(is_paged(weight));  // with a warning: paging would end the sharing
  view.fill_(5);
  CHECK(weight.sum().item<double>() == 5 * 512 * 256);
  weight.set_data(torch::full({512, 256}, 2.0));
  CHECK(weight.sum().item<double>() == 2 * 512 * 256);
}

TEST_CASE("TorchScript modules that are loaded in a scope are paged, train and are saved") {
  const Folder folder;
  {
    torch::jit::Module module("m");
    torch::manual_seed(1);
    module.register_parameter("weight", torch::randn({512, 256}).requires_grad_(), false);
    module.register_buffer("scale", torch::ones({256}));
    module.define("def forward(self, x):\n  return torch.relu(x @ self.weight) * self.scale\n");
    module.save(folder.file("script.pt"));
  }
  auto plain = torch::jit::load(folder.file("script.pt"));
  const auto space = make_space();
  auto module = [&] {
    const auto scope = space->enter();
    return torch::jit::load(folder.file("script.pt"));
  }();
  CHECK(is_paged(module.attr("weight").toTensor()));
  const auto step = [](torch::jit::Module& m) {
    auto weight = m.attr("weight").toTensor();
    const auto x = torch::ones({8, 512});
    m.forward({x}).toTensor().square().mean().backward();
    torch::NoGradGuard no_grad;
    weight.sub_(weight.grad(), 0.1);
    weight.mutable_grad().zero_();
  };
  for (int i = 0; i < 3; ++i) step(plain), step(module);
  CHECK(torch::equal(plain.attr("weight").toTensor(), module.attr("weight").toTensor()));
  CHECK(is_paged(module.attr("weight").toTensor()));
  module.save(folder.file("trained.pt"));
  const auto again = torch::jit::load(folder.file("trained.pt"));
  CHECK(torch::equal(again.attr("weight").toTensor(), plain.attr("weight").toTensor()));
}

TEST_CASE("libtorch's optimizers are updated early, their clipping too, and equal the plain run to the bit") {
  const auto make = [] {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(512, 1024), torch::nn::ReLU(), torch::nn::Linear(1024, 512));
  };
  const auto run = [](torch::nn::Sequential& model, torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 6; ++i) {
      const auto x = torch::full({4, 512}, 0.1 * (i + 1));
      const auto closure = [&] {
        const auto loss = model->forward(x).square().mean();
        loss.backward();
        torch::nn::utils::clip_grad_norm_(model->parameters(), 100);  // never acts
        return loss;
      };
      CHECK(optimizer.step(closure).item<float>() > 0);
      optimizer.zero_grad();
    }
  };
  const auto check = [&](auto make_optimizer) {
    auto plain = make();
    auto plain_optimizer = make_optimizer(plain->parameters());
    run(plain, plain_optimizer);
    const auto space = make_space("5MB", "1MB");
    auto model = [&] {
      const auto scope = space->enter();
      return make();
    }();
    auto optimizer = make_optimizer(model->parameters());
    run(model, optimizer);
    CHECK(are_equal(*plain, *model));
    CHECK(space->report().updates_committed > 0);
  };
  using Parameters = std::vector<torch::Tensor>;
  check([](Parameters p) { return torch::optim::AdamW(std::move(p), options); });
  check([](Parameters p) { return torch::optim::Adam(std::move(p), torch::optim::AdamOptions(1e-3).amsgrad(true)); });
  check([](Parameters p) { return torch::optim::SGD(std::move(p), torch::optim::SGDOptions(1e-2).momentum(0.9)); });
  check([](Parameters p) { return torch::optim::RMSprop(std::move(p), torch::optim::RMSpropOptions(1e-3)); });
  check([](Parameters p) { return torch::optim::Adagrad(std::move(p), torch::optim::AdagradOptions(1e-3)); });
}

TEST_CASE("an address that a paged tensor does not have is an AccessError and a c10::Error") {
  const auto space = make_space();
  torch::Tensor tensor;
  {
    const auto scope = space->enter();
    tensor = torch::ones({1000, 100});
  }
  CHECK_THROWS_AS(tensor.data_ptr(), AccessError);
  CHECK_THROWS_AS(tensor.const_data_ptr(), c10::Error);
  CHECK_THROWS_AS((void)tensor.data_ptr<float>(), std::exception);
  try {
    (void)tensor.mutable_data_ptr();
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("zeropage::pin") != std::string::npos);
    CHECK(std::string(error.what()).find("Exception raised") == std::string::npos);
  }
}
