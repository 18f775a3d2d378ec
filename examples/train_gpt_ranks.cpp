// Trains a byte-level GPT from C++ over ranks, its states partitioned among them.
//
//   torchrun --no-python --nproc-per-node 2 train_gpt_ranks [--steps N] [--stage 0|1|2|3] [--check] FILE...
//
// FILE... is the text. --check also trains alone, on all ranks' data, and compares losses and parameters.
#include <getopt.h>
#include <zeropage/comm/torchrun.h>
#include <zeropage/zeropage.h>

#include <cmath>
#include <iostream>

#include "gpt.h"

struct Options {
  GPTSize size;
  int steps = 10;
  std::int64_t batch = 2;  // a rank
  std::string stage = "3";
  bool check = false;
  std::vector<std::string> files;
};

struct Trained {
  GPT model;
  std::vector<double> losses;  // of all data
};

// A rank's batch at a step: a function of both, so that one process can read all batches.
torch::Tensor batch_of(const torch::Tensor& text, const Options& options, int step, int rank, int ranks) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1 + step * ranks + rank);
  return draw(text, options.size, options.batch, generator);
}

Trained train_over_ranks(const Options& options, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  torch::manual_seed(group->getRank());  // a scope draws rank 0's numbers on all ranks
  const auto space = zeropage::Space::make(
      {.states = "host", .device_memory = "32MB", .host_memory = "128MB", .stage = options.stage, .device = "cpu"},
      {.shard = group, .replica = {}, .node = {}});
  auto scope = space->enter();
  GPT model(options.size);
  scope.leave();  // from here on all ranks have the same
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
  const auto text = read_text(options.files, options.size);
  std::vector<double> losses;
  for (int step = 0; step < options.steps; ++step) {
    const auto loss = loss_of(model, batch_of(text, options, step, group->getRank(), group->getSize()));
    loss.backward();
    nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    std::vector<torch::Tensor> mean{loss.detach() / group->getSize()};
    group->allreduce(mean)->wait();
    losses.push_back(mean[0].item<double>());
    if (group->getRank() == 0) {
      std::cout << "step " << step + 1 << "/" << options.steps << "  loss " << losses.back() << std::endl;
    }
  }
  const auto report = space->report();
  if (group->getRank() == 0) {
    for (const auto& home : report.homes) std::cout << home.role << ": peak " << home.peak / 1e6 << " MB a rank\n";
    std::cout << "sent by a rank: all-gathers " << report.gathered_bytes / 1e6 << " MB, gradients "
              << report.reduced_bytes / 1e6 << " MB" << std::endl;
  }
  return {model, losses};
}

Trained train_alone(const Options& options, int ranks) {
  torch::manual_seed(0);  // as rank 0
  GPT model(options.size);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
  const auto text = read_text(options.files, options.size);
  std::vector<double> losses;
  for (int step = 0; step < options.steps; ++step) {
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto loss = loss_of(model, batch_of(text, options, step, rank, ranks)) / ranks;
      loss.backward();
      sum += loss.item<double>();
    }
    nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(sum);
  }
  return {model, losses};
}

bool agree(const Trained& a, const Trained& b) {
  for (std::size_t i = 0; i < a.losses.size(); ++i) {
    if (std::abs(a.losses[i] - b.losses[i]) > 1e-6 * std::abs(b.losses[i])) return false;
  }
  const auto ours = a.model->parameters(), theirs = b.model->parameters();
  for (std::size_t i = 0; i < ours.size(); ++i) {
    // Adam divides by the root of tiny squares, so a last bit of a gradient may show.
    if (!torch::allclose(ours[i], theirs[i], 1e-3, 1e-4)) return false;
  }
  return true;
}

Options parse(int count, char** arguments) {
  Options options;
  const option known[] = {{"steps", required_argument, nullptr, 's'},
                          {"stage", required_argument, nullptr, 'z'},
                          {"check", no_argument, nullptr, 'c'},
                          {}};
  for (int found; (found = getopt_long(count, arguments, "", known, nullptr)) != -1;) {
    if (found == 's') {
      options.steps = std::stoi(optarg);
    } else if (found == 'z') {
      options.stage = optarg;
    } else if (found == 'c') {
      options.check = true;
    } else {
      throw std::runtime_error("see the first lines of examples/train_gpt_ranks.cpp for the options");
    }
  }
  options.files.assign(arguments + optind, arguments + count);
  if (options.files.empty()) throw std::runtime_error("give one or more text files to train on");
  return options;
}

int main(int count, char** arguments) try {
  const Options options = parse(count, arguments);
  const auto group = zeropage::torchrun_group();
  const Trained paged = train_over_ranks(options, group);
  if (!options.check) return 0;
  const bool equal = agree(paged, train_alone(options, group->getSize()));
  if (group->getRank() == 0) {
    std::cout << (equal ? "equal to one process on all the data" : "NOT equal") << std::endl;
  }
  return equal ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "train_gpt_ranks: " << error.what() << "\n";
  return 1;
}
