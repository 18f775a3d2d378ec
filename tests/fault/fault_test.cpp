#include <doctest/doctest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "temporary_directory.h"
#include "zeropage/train/gradients.h"
#include "zeropage/zeropage.h"

using namespace zeropage;

namespace {

Config on_disk(const std::string& path, const char* memory = "2MB") {
  Config config;
  config.device = "cpu";
  config.parameters = config.gradients = config.optimizer = "disk";
  config.disk_path = path;
  config.device_memory = config.host_memory = memory;
  config.min_page_bytes = "1";
  config.page_size = "16KiB";
  return config;
}

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{nullptr}, second{nullptr};
  NetImpl() {
    first = register_module("first", torch::nn::Linear(300, 257));
    second = register_module("second", torch::nn::Linear(257, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
};
TORCH_MODULE(Net);

std::vector<float> train(Net& net) {
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  std::vector<float> losses;
  for (int step = 0; step < 3; ++step) {
    torch::manual_seed(step);
    auto loss = net(torch::randn({5, 300})).pow(2).sum();
    losses.push_back(loss.item<float>());
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    for (auto& p : net->parameters()) evict(p);
  }
  return losses;
}

}  // namespace

TEST_CASE("a libtorch module trains paged as it trains plain, to the bit") {
  TemporaryDirectory directory;
  torch::manual_seed(1);
  Net plain;
  auto space = Space::make(on_disk(directory.path()));
  torch::manual_seed(1);
  Net paged{nullptr};
  {
    auto scope = space->enter();
    paged = Net();
  }
  for (auto& p : paged->parameters()) CHECK(is_paged(p));
  CHECK(train(plain) == train(paged));
  for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
    CHECK(torch::equal(plain->parameters()[i], paged->parameters()[i]));
  }
  const Report report = space->report();
  for (const auto& budget : report.budgets) CHECK(budget.peak <= budget.limit);
  CHECK(report.written_bytes > 0);
}

TEST_CASE("an update ahead of the step writes no page that another thread is reading") {
  TemporaryDirectory directory;
  Config config = on_disk(directory.path());
  config.compute_dtype = "bfloat16";
  config.early_update = "always";
  auto space = Space::make(config, Frontend::python);  // which SGD with one rate does not need
  torch::nn::Linear layer(torch::nn::LinearOptions(300, 257).bias(false));
  REQUIRE(space->page(layer->weight));
  REQUIRE(space->mix(layer->weight));
  torch::optim::SGD optimizer(layer->parameters(), torch::optim::SGDOptions(1.0));
  const auto x = torch::ones({5, 300}).to(at::kBFloat16);
  for (int step = 0; step < 6; ++step) {
    layer(x).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(space->report().early_updates > 0);
  const auto loss = layer(x).sum();
  auto& segment = *segment_of(layer->weight);
  PagePin page = segment.cache()->pin_page(segment, 0, Access::read);
  page.wait();
  const std::vector<std::byte> before(page.data(), page.data() + segment.bytes_of(0));
  loss.backward();
  CHECK(std::equal(before.begin(), before.end(), page.data()));
}

TEST_CASE("errors of operators are typed and name the operator") {
  TemporaryDirectory directory;
  auto space = Space::make(on_disk(directory.path(), "200kB"));
  torch::Tensor weight;
  {
    auto scope = space->enter();
    weight = torch::zeros({300, 300});
  }
  CHECK_THROWS_WITH_AS(torch::mm(weight, weight), doctest::Contains("aten::mm on paged Float [300, 300]"),
                       BudgetError);
  space->close();
  CHECK_THROWS_AS(weight.zero_(), AccessError);
}

TEST_CASE("a tensor's segment is found while other threads pin it and let go") {
  TemporaryDirectory directory;
  auto space = Space::make(on_disk(directory.path()));
  torch::Tensor tensor = torch::ones({60, 60});
  REQUIRE(space->page(tensor));
  std::atomic<bool> done = false;
  std::atomic<int> missed = 0;
  std::thread reader([&] {
    while (!done) missed += segment_of(tensor) == nullptr;
  });
  for (int i = 0; i < 200000; ++i) const RawPin held = pin(tensor);
  done = true;
  reader.join();
  CHECK(missed == 0);
}

TEST_CASE("threads that meet a leaf at once put one hook before its node") {
  TemporaryDirectory directory;
  auto space = Space::make(on_disk(directory.path()));
  for (int round = 0; round < 500; ++round) {
    torch::Tensor leaf = torch::ones({4, 4});
    REQUIRE(space->page(leaf));
    leaf.requires_grad_();
    const LeafHold node = torch::autograd::impl::grad_accumulator(leaf);
    std::atomic<int> waiting = 2;
    const auto meet = [&] {
      --waiting;
      while (waiting > 0) {
      }
      (void)hook_gradient(leaf);
    };
    std::thread other(meet);
    meet();
    other.join();
    REQUIRE(node->pre_hooks().size() == 1);
  }
}
