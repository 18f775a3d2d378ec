// Trains a byte-level GPT from C++, with its states on disk: a libtorch module and torch::optim::AdamW, unchanged.
//
//   train_gpt [--steps N] [--width N] [--layers N] [--disk DIRECTORY] [--memory SIZE] [--device NAME]
//             [--plain | --check] FILE...
//
// FILE... is the text; the device is the CPU, unless one is named. --plain trains without zeropage; --check trains
// both ways and compares them to the bit.
#include <getopt.h>
#include <torch/torch.h>
#include <zeropage/zeropage.h>

#include <iostream>

#include "gpt.h"

struct Options {
  GPTSize size;
  int steps = 20;
  std::int64_t batch = 4;
  std::string disk = ".", memory = "16MB", device = "cpu";
  bool plain = false, check = false;
  std::vector<std::string> files;
};

struct Trained {
  GPT model;
  std::vector<double> losses;
};

// The only lines that know of zeropage.
std::shared_ptr<zeropage::Space> make_space(const Options& options) {
  return zeropage::Space::make({.states = "disk",
                                .disk_path = options.disk,
                                .device_memory = options.memory,
                                .host_memory = options.memory,
                                .device = options.device});
}
GPT make_paged(const Options& options, zeropage::Space& space) {
  const auto scope = space.enter();
  return GPT(options.size);
}

Trained train(const Options& options, bool plain) {
  torch::manual_seed(0);
  const auto space = plain ? nullptr : make_space(options);
  GPT model = plain ? GPT(options.size) : make_paged(options, *space);
  if (plain) model->to(torch::Device(options.device));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
  const auto text = read_text(options.files, options.size);
  const auto generator = at::detail::createCPUGenerator(/*seed=*/1);
  std::vector<double> losses;
  for (int step = 0; step < options.steps; ++step) {
    const auto loss = loss_of(model, draw(text, options.size, options.batch, generator).to(options.device));
    loss.backward();
    nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
    std::cout << (plain ? "plain" : "paged") << " step " << step + 1 << "/" << options.steps << "  loss "
              << losses.back() << std::endl;
  }
  if (space) {
    const auto report = space->report();
    std::cout << "faults " << report.faults << ", read " << report.read_bytes / 1e6 << " MB, written "
              << report.written_bytes / 1e6 << " MB, " << report.io << "\n";
    for (const auto& budget : report.budgets) {
      std::cout << budget.name << ": peak " << budget.peak / 1e6 << " of " << budget.limit / 1e6 << " MB\n";
    }
  }
  return {model, losses};
}

Options parse(int count, char** arguments) {
  Options options;
  const option known[] = {{"steps", required_argument, nullptr, 's'},
                          {"width", required_argument, nullptr, 'w'},
                          {"layers", required_argument, nullptr, 'l'},
                          {"disk", required_argument, nullptr, 'd'},
                          {"memory", required_argument, nullptr, 'm'},
                          {"device", required_argument, nullptr, 'D'},
                          {"plain", no_argument, nullptr, 'p'},
                          {"check", no_argument, nullptr, 'c'},
                          {}};
  for (int found; (found = getopt_long(count, arguments, "", known, nullptr)) != -1;) {
    switch (found) {
      case 's':
        options.steps = std::stoi(optarg);
        break;
      case 'w':
        options.size.width = std::stoi(optarg);
        break;
      case 'l':
        options.size.layers = std::stoi(optarg);
        break;
      case 'd':
        options.disk = optarg;
        break;
      case 'm':
        options.memory = optarg;
        break;
      case 'D':
        options.device = optarg;
        break;
      case 'p':
        options.plain = true;
        break;
      case 'c':
        options.check = true;
        break;
      default:
        throw std::runtime_error("see the first lines of examples/train_gpt.cpp for the options");
    }
  }
  options.files.assign(arguments + optind, arguments + count);
  if (options.files.empty()) throw std::runtime_error("give one or more text files to train on");
  return options;
}

int main(int count, char** arguments) try {
  const Options options = parse(count, arguments);
  if (!options.check) {
    train(options, options.plain);
    return 0;
  }
  const Trained plain = train(options, true), paged = train(options, false);
  bool equal = plain.losses == paged.losses;
  const auto a = plain.model->parameters(), b = paged.model->parameters();
  for (std::size_t i = 0; i < a.size(); ++i) equal = equal && torch::equal(a[i], b[i]);
  std::cout << (equal ? "equal to the bit: losses and parameters" : "NOT equal") << std::endl;
  return equal ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "train_gpt: " << error.what() << "\n";
  return 1;
}
