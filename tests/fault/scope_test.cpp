// Init scopes: nesting, threads, exceptions, and mixed precision at their end.
#include <doctest/doctest.h>
#include <torch/torch.h>

#include <thread>

#include "temporary_directory.h"
#include "zeropage/rules/mixed.h"
#include "zeropage/space/frontend.h"
#include "zeropage/zeropage.h"

using namespace zeropage;

namespace {

std::shared_ptr<Space> make_space(const TemporaryDirectory& directory, const std::string& compute_dtype = "auto") {
  return Space::make({.states = "disk",
                      .disk_path = directory.path(),
                      .device_memory = "4MB",
                      .host_memory = "4MB",
                      .compute_dtype = compute_dtype,
                      .device = "cpu",
                      .page_size = "16KiB"});
}

torch::Tensor make_tensor() { return torch::ones({300, 300}); }

torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(300, 257), torch::nn::Tanh(), torch::nn::Linear(257, 7));
}

std::vector<float> train(torch::nn::Sequential& model) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<float> losses;
  for (int step = 0; step < 4; ++step) {
    torch::manual_seed(step);
    const auto loss = model->forward(torch::randn({5, 300}).to(at::kBFloat16)).to(at::kFloat).pow(2).sum();
    losses.push_back(loss.item<float>());
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  return losses;
}

}  // namespace

TEST_CASE("a scope that ends before one entered later says so, and the thread's nesting stays right") {
  TemporaryDirectory directory;
  const auto space = make_space(directory), other = make_space(directory);
  auto* const outer = new InitScope(space->enter());
  InitScope inner = other->enter();
  CHECK_THROWS_WITH_AS(outer->leave(), doctest::Contains("reverse order"), AccessError);
  CHECK(other->holds(make_tensor()));  // leave() changed nothing
  CHECK_THROWS_AS(delete outer, AccessError);
  CHECK(other->holds(make_tensor()));
  inner.leave();
  CHECK_FALSE(is_paged(make_tensor()));
}

TEST_CASE("a scope that ends on another thread says so, and leaves its own thread") {
  TemporaryDirectory directory;
  const auto space = make_space(directory);
  auto* const scope = new InitScope(space->enter());
  std::string left, ended;
  const auto note = [](std::string& said, auto&& run) {
    try {
      run();
    } catch (const AccessError& error) {
      said = error.what();
    }
  };
  std::thread([&] { note(left, [&] { scope->leave(); }); }).join();
  CHECK(left.find("another thread") != std::string::npos);
  CHECK(space->holds(make_tensor()));
  std::thread([&] { note(ended, [&] { delete scope; }); }).join();
  CHECK(ended == left);
  CHECK_FALSE(is_paged(make_tensor()));
}

TEST_CASE("an exception leaves all scopes, also those that are in the wrong order") {
  TemporaryDirectory directory;
  const auto space = make_space(directory);
  const auto fail = [&] {
    const std::unique_ptr<InitScope> held(new InitScope(space->enter()));
    const InitScope inner = space->enter();
    throw std::runtime_error("the program's");
  };
  CHECK_THROWS_WITH(fail(), "the program's");
  CHECK_FALSE(is_paged(make_tensor()));
  std::unique_ptr<InitScope> inner;
  const auto fail_in_disorder = [&] {
    const InitScope outer = space->enter();
    inner.reset(new InitScope(space->enter()));
    throw std::runtime_error("the program's");
  };
  CHECK_THROWS_WITH(fail_in_disorder(), "the program's");
  CHECK(is_paged(make_tensor()));
  inner->leave();
  CHECK_FALSE(is_paged(make_tensor()));
}

TEST_CASE("threads enter a space by themselves, while another thread is in its scope") {
  TemporaryDirectory directory;
  const auto space = make_space(directory);
  const InitScope scope = space->enter();
  constexpr int kThreads = 4, kLayers = 8;
  std::vector<torch::nn::Linear> layers(kThreads * kLayers, nullptr);
  std::atomic<int> paged_outside = 0, ordinary_inside = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      paged_outside += is_paged(make_tensor());
      for (int layer = i * kLayers; layer < (i + 1) * kLayers; ++layer) {
        const InitScope own = space->enter();
        layers[layer] = torch::nn::Linear(300, 257);
        ordinary_inside += !space->holds(layers[layer]->weight);
        c10::NoGradGuard no_grad;
        layers[layer]->weight.fill_(layer);
      }
      paged_outside += is_paged(make_tensor());
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(paged_outside == 0);
  CHECK(ordinary_inside == 0);
  CHECK(space->holds(make_tensor()));
  for (int i = 0; i < kThreads * kLayers; ++i) CHECK(plain_copy(layers[i]->weight).eq(i).all().item<bool>());
}

TEST_CASE("the end of a scope gives parameters their masters, and training equals mixing by hand") {
  TemporaryDirectory directory;
  const auto space = make_space(directory, "bfloat16");
  torch::nn::Sequential paged{nullptr}, by_hand = make_model();
  torch::nn::BatchNorm1d norm{nullptr};
  {
    const auto outer = space->enter();
    {
      const auto inner = space->enter();
      paged = make_model();
    }
    CHECK((paged->parameters()[0].scalar_type() == at::kFloat));  // a part of the outer scope
    norm = torch::nn::BatchNorm1d(300);
  }
  for (at::Tensor& parameter : by_hand->parameters()) {
    REQUIRE(space->page(parameter));
    REQUIRE(space->mix(parameter));
  }
  for (const at::Tensor& parameter : paged->parameters()) {
    CHECK((parameter.scalar_type() == at::kBFloat16));
    CHECK((most_precise(parameter).scalar_type() == at::kFloat));
    CHECK(parameter.requires_grad());
  }
  CHECK((norm->weight.scalar_type() == at::kBFloat16));
  CHECK((norm->running_mean.scalar_type() == at::kFloat));
  CHECK(train(paged) == train(by_hand));
  for (std::size_t i = 0; i < paged->parameters().size(); ++i) {
    CHECK(torch::equal(most_precise(paged->parameters()[i]), most_precise(by_hand->parameters()[i])));
  }
}

TEST_CASE("parameters that operators made from factories get masters too, and temporaries do not") {
  TemporaryDirectory directory;
  const auto space = make_space(directory, "bfloat16");
  torch::Tensor scaled, frozen;
  {
    const auto scope = space->enter();
    scaled = (torch::randn({300, 300}) * 0.02).requires_grad_();
    frozen = torch::randn({300, 300});
    for (int i = 0; i < 3000; ++i) torch::ones({4, 4});
  }
  CHECK((scaled.scalar_type() == at::kBFloat16));
  CHECK((frozen.scalar_type() == at::kFloat));
}
