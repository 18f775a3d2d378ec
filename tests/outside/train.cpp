// Trains two steps with states on disk, and compares losses and parameters with plain libtorch.
//
//   train DIRECTORY
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>
#include <zeropage/zeropage.h>

#include <cstdint>
#include <iostream>
#include <string>

namespace {

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(512, 1024), torch::nn::GELU(), torch::nn::Linear(1024, 512),
                               torch::nn::Linear(512, 1024), torch::nn::GELU(), torch::nn::Linear(1024, 512));
}

std::vector<double> train(torch::nn::Sequential& model) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  std::vector<double> losses;
  for (int step = 0; step < 2; ++step) {
    const auto x = torch::linspace(-1, 1, 8 * 512).reshape({8, 512});
    const auto loss = (model->forward(x) - x).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

/// The largest difference of each pair of parameters that differ.
std::string difference(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  std::string difference;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (torch::equal(a[i], b[i])) continue;
    const torch::Tensor by = (a[i] - b[i]).detach().abs();
    difference += " parameter " + std::to_string(i) + ": " + std::to_string((by > 0).sum().item<std::int64_t>()) +
                  " elements by up to " + std::to_string(by.max().item<double>() * 1e6) + "e-6;";
  }
  return difference;
}

}  // namespace

int main(int, char** arguments) {
  // MKL's vector functions, first used by two threads at once, may round that call unlike later ones.
  torch::ones({1}).sqrt();
  auto plain = make_model(), again = make_model();
  const auto plain_losses = train(plain);

  const auto space = zeropage::Space::make(
      {.states = "disk", .disk_path = arguments[1], .device_memory = "8MB", .host_memory = "8MB", .device = "cpu"});
  torch::nn::Sequential paged;
  {
    const auto scope = space->enter();
    paged = make_model();
  }
  const bool losses_equal = train(paged) == plain_losses;
  const auto differs = difference(plain->parameters(), paged->parameters());
  const bool equal = losses_equal && differs.empty();
  const auto read = space->report().read_bytes;
  std::cout << (equal ? "equal" : "NOT equal" + differs) << ", read " << read / 1000000 << " MB\n";
  if (!equal) {
    const bool is_steady =
        train(again) == plain_losses && difference(plain->parameters(), again->parameters()).empty();
    std::cout << (losses_equal ? "" : "losses differ; ") << "plain libtorch repeats itself: " << is_steady << "\n";
  }
  return equal && read > 0 ? 0 : 1;
}
