// Trains a byte-level GPT from C++, with its states on disk: a libtorch module and torch::optim::AdamW, unchanged.
//
//   train_gpt [--steps N] [--width N] [--layers N] [--disk DIRECTORY] [--memory SIZE] [--plain | --check] FILE...
//
// FILE... is the text. --plain trains without zeropage; --check trains both ways and compares them to the bit.
#include <getopt.h>
#include <torch/torch.h>
#include <zeropage/zeropage.h>

#include <fstream>
#include <iostream>
#include <iterator>

namespace nn = torch::nn;

struct Options {
  int steps = 20;
  std::int64_t width = 256, layers = 4, heads = 4, length = 128, batch = 4;
  std::string disk = ".", memory = "16MB";
  bool plain = false, check = false;
  std::vector<std::string> files;
};

struct BlockImpl : nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads)
      : heads(heads),
        norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", nn::Linear(width, 3 * width))),
        out(register_module("out", nn::Linear(width, width))),
        up(register_module("up", nn::Linear(width, 4 * width))),
        down(register_module("down", nn::Linear(4 * width, width))) {}

  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv(norm1(x)).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto attended =
        torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + out(attended.transpose(1, 2).reshape({batch, length, width}));
    return x + down(torch::gelu(up(norm2(x))));
  }

  std::int64_t heads;
  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, out, up, down;
};
TORCH_MODULE(Block);

struct GPTImpl : nn::Module {
  explicit GPTImpl(const Options& options)
      : bytes(register_module("bytes", nn::Embedding(256, options.width))),
        places(register_module("places", nn::Embedding(options.length, options.width))),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({options.width})))),
        head(register_module("head", nn::Linear(nn::LinearOptions(options.width, 256).bias(false)))) {
    register_module("blocks", blocks);
    for (int i = 0; i < options.layers; ++i) blocks->push_back(Block(options.width, options.heads));
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      if (parameter.dim() == 2) parameter.normal_(0, 0.02);
    }
  }

  torch::Tensor forward(const torch::Tensor& text) {
    auto x = bytes(text) + places(torch::arange(text.size(1)));
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(norm(x));
  }

  nn::Embedding bytes, places;
  nn::ModuleList blocks;
  nn::LayerNorm norm;
  nn::Linear head;
};
TORCH_MODULE(GPT);

torch::Tensor read_text(const std::vector<std::string>& files) {
  std::string text;
  for (const auto& name : files) {
    std::ifstream file(name, std::ios::binary);
    if (!file) throw std::runtime_error(name + " cannot be read");
    text.append(std::istreambuf_iterator<char>(file), {});
  }
  return torch::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, torch::kUInt8).clone();
}

struct Trained {
  GPT model;
  std::vector<double> losses;
};

// The only lines that know of zeropage.
std::shared_ptr<zeropage::Space> make_space(const Options& options) {
  return zeropage::Space::make({.device = "cpu",
                                .parameters = "disk",
                                .gradients = "disk",
                                .optimizer = "disk",
                                .disk_path = options.disk,
                                .device_memory = options.memory,
                                .host_memory = options.memory});
}
GPT make_paged(const Options& options, zeropage::Space& space) {
  const auto scope = space.enter();
  return GPT(options);
}

Trained train(const Options& options, bool plain) {
  torch::manual_seed(0);
  const auto space = plain ? nullptr : make_space(options);
  GPT model = plain ? GPT(options) : make_paged(options, *space);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
  const auto text = read_text(options.files);
  if (text.numel() < options.length + 2) throw std::runtime_error("the text is shorter than one context");
  std::vector<double> losses;
  for (int step = 0; step < options.steps; ++step) {
    const auto starts = torch::randint(text.numel() - options.length - 1, {options.batch, 1});
    const auto window = text.index({starts + torch::arange(options.length + 1)}).to(torch::kLong);
    const auto logits = model(window.slice(1, 0, -1));
    const auto loss = nn::functional::cross_entropy(logits.flatten(0, 1), window.slice(1, 1).flatten());
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
  const option known[] = {{"steps", required_argument, nullptr, 's'},  {"width", required_argument, nullptr, 'w'},
                          {"layers", required_argument, nullptr, 'l'}, {"disk", required_argument, nullptr, 'd'},
                          {"memory", required_argument, nullptr, 'm'}, {"plain", no_argument, nullptr, 'p'},
                          {"check", no_argument, nullptr, 'c'},        {}};
  for (int found; (found = getopt_long(count, arguments, "", known, nullptr)) != -1;) {
    switch (found) {
      case 's':
        options.steps = std::stoi(optarg);
        break;
      case 'w':
        options.width = std::stoi(optarg);
        break;
      case 'l':
        options.layers = std::stoi(optarg);
        break;
      case 'd':
        options.disk = optarg;
        break;
      case 'm':
        options.memory = optarg;
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
