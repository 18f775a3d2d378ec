// A byte-level GPT in libtorch, and the text it reads: what the C++ examples share. Nothing here knows of zeropage.
#pragma once

#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

namespace nn = torch::nn;

struct GPTSize {
  std::int64_t width = 256, layers = 4, heads = 4, length = 128;
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
  explicit GPTImpl(const GPTSize& size)
      : bytes(register_module("bytes", nn::Embedding(256, size.width))),
        places(register_module("places", nn::Embedding(size.length, size.width))),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({size.width})))),
        head(register_module("head", nn::Linear(nn::LinearOptions(size.width, 256).bias(false)))) {
    register_module("blocks", blocks);
    for (int i = 0; i < size.layers; ++i) blocks->push_back(Block(size.width, size.heads));
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      if (parameter.dim() == 2) parameter.normal_(0, 0.02);
    }
  }

  torch::Tensor forward(const torch::Tensor& text) {
    auto x = bytes(text) + places(torch::arange(text.size(1), text.device()));
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(norm(x));
  }

  nn::Embedding bytes, places;
  nn::ModuleList blocks;
  nn::LayerNorm norm;
  nn::Linear head;
};
TORCH_MODULE(GPT);

inline torch::Tensor read_text(const std::vector<std::string>& files, const GPTSize& size) {
  std::string text;
  for (const auto& name : files) {
    std::ifstream file(name, std::ios::binary);
    if (!file) throw std::runtime_error(name + " cannot be read");
    text.append(std::istreambuf_iterator<char>(file), {});
  }
  if (static_cast<std::int64_t>(text.size()) < size.length + 2) {
    throw std::runtime_error("the text is shorter than one context");
  }
  return torch::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, torch::kUInt8).clone();
}

/// `batch` contexts of the text at random, [batch, length + 1].
inline torch::Tensor draw(const torch::Tensor& text, const GPTSize& size, std::int64_t batch,
                          std::optional<at::Generator> generator = std::nullopt) {
  const auto starts = torch::randint(text.numel() - size.length - 1, {batch, 1}, generator);
  return text.index({starts + torch::arange(size.length + 1)}).to(torch::kLong);
}

inline torch::Tensor loss_of(GPT& model, const torch::Tensor& window) {
  const auto logits = model(window.slice(1, 0, -1));
  return nn::functional::cross_entropy(logits.flatten(0, 1), window.slice(1, 1).flatten());
}
