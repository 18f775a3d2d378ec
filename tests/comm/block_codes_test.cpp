#include "zeropage/comm/block_codes.h"

#include <doctest/doctest.h>
#include <torch/torch.h>

#include <limits>

using namespace zeropage;
using kernels::CodeBits;

TEST_CASE("PyTorch's operators code and decode as the kernels do") {
  torch::manual_seed(0);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    for (const CodeBits bits : {CodeBits::four, CodeBits::eight}) {
      for (const std::int64_t count : {1, 64, 255, 256, 320, 100'000}) {
        torch::Tensor x = torch::randn({count});
        x.slice(0, 0, count, 7).mul_(30);
        if (count > 300) {
          x[260] = std::numeric_limits<float>::infinity();
          x.slice(0, 512, 768).zero_();
        }
        x = x.to(dtype);
        const torch::Tensor coded = code(x, bits), by_torch = code_by_torch(x, bits);
        REQUIRE(coded.numel() == static_cast<std::int64_t>(kernels::coded_bytes(count, bits)));
        // The bits of a NaN are anyone's.
        const torch::Tensor decoded = uncode_by_torch(coded, count, bits);
        REQUIRE(torch::allclose(decoded, uncode_by_torch(by_torch, count, bits), 0, 0, /*equal_nan=*/true));
        if (count < 300) REQUIRE(torch::equal(coded, by_torch));
        torch::Tensor back = torch::empty_like(x);
        uncode_into(back, coded, bits);
        REQUIRE(torch::allclose(back.to(torch::kFloat), decoded.to(dtype).to(torch::kFloat), 0, 0, true));
      }
    }
  }
}
