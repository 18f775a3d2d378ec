#include "zeropage/comm/block_codes.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <limits>

#include "zeropage/comm/formats.h"

namespace zeropage {
namespace {

using kernels::CodeBits;

constexpr auto kBlock = static_cast<std::int64_t>(kernels::kQuantum);
constexpr std::int64_t kGrain = 128;  // blocks, for one thread

std::int64_t bytes_of(std::int64_t elements, CodeBits bits) {
  return static_cast<std::int64_t>(kernels::coded_bytes(static_cast<std::size_t>(elements), bits));
}

template <class Work>
void for_blocks(std::int64_t elements, Work&& work) {
  at::parallel_for(0, (elements + kBlock - 1) / kBlock, kGrain, [&](std::int64_t begin, std::int64_t end) {
    work(begin * kBlock, static_cast<std::size_t>(std::min(end * kBlock, elements) - begin * kBlock));
  });
}

bool has_kernel(const at::Tensor& tensor) {
  return tensor.is_cpu() && format_of(tensor.scalar_type()) != kernels::Format::none;
}

}  // namespace

at::Tensor code_by_torch(const at::Tensor& flat, CodeBits bits) {
  const std::int64_t elements = flat.numel(), blocks = (elements + kBlock - 1) / kBlock;
  const at::Tensor x =
      at::constant_pad_nd(flat.to(at::kFloat), {0, blocks * kBlock - elements}).view({blocks, kBlock});
  const double most = bits == CodeBits::eight ? 127 : 7;
  const at::Tensor largest = x.abs().amax({1}, /*keepdim=*/true);
  const at::Tensor is_finite = largest.isfinite(), has_codes = is_finite.logical_and(largest.ge(0x1p-100));
  at::Tensor scale = at::where(has_codes, largest.div(most), 0.0);
  scale = at::where(is_finite, scale, std::numeric_limits<double>::quiet_NaN()).to(at::kFloat);
  at::Tensor codes =
      at::where(has_codes, x.mul(at::full_like(largest, most).div(largest)).round(), 0.0).to(at::kChar);
  codes = codes.view(at::kByte);
  if (bits == CodeBits::four) {
    const at::Tensor pairs = codes.view({blocks, kBlock / 2, 2});
    codes = pairs.select(2, 0).bitwise_and(0xf).bitwise_or(pairs.select(2, 1).bitwise_left_shift(4));
  }
  return at::cat({scale.contiguous().view(at::kByte), codes}, 1).view({-1}).narrow(0, 0, bytes_of(elements, bits));
}

at::Tensor uncode_by_torch(const at::Tensor& coded, std::int64_t elements, CodeBits bits) {
  const std::int64_t blocks = (elements + kBlock - 1) / kBlock, block = bytes_of(kBlock, bits);
  const at::Tensor rows = at::constant_pad_nd(coded, {0, blocks * block - coded.numel()}).view({blocks, block});
  const at::Tensor scale = rows.narrow(1, 0, kernels::kScaleBytes).contiguous().view(at::kFloat);
  at::Tensor codes = rows.narrow(1, kernels::kScaleBytes, block - kernels::kScaleBytes).contiguous().view(at::kChar);
  if (bits == CodeBits::four) {
    const at::Tensor low = codes.bitwise_left_shift(4).bitwise_right_shift(4), high = codes.bitwise_right_shift(4);
    codes = at::stack({low, high}, 2).view({blocks, kBlock});
  }
  return codes.to(at::kFloat).mul(scale).view({-1}).narrow(0, 0, elements);
}

void code_into(const at::Tensor& to, const at::Tensor& flat, CodeBits bits) {
  if (!has_kernel(flat)) return void(to.copy_(code_by_torch(flat, bits)));
  auto* const into = static_cast<std::byte*>(to.mutable_data_ptr());
  for_blocks(flat.numel(), [&](std::int64_t begin, std::size_t count) {
    kernels::code(array_of(flat, begin), count, bits, into + bytes_of(begin, bits));
  });
}

at::Tensor code(const at::Tensor& flat, CodeBits bits) {
  at::Tensor coded = at::empty({bytes_of(flat.numel(), bits)}, flat.options().dtype(at::kByte));
  code_into(coded, flat, bits);
  return coded;
}

void uncode_into(const at::Tensor& to, const at::Tensor& coded, CodeBits bits) {
  if (!has_kernel(to)) return void(to.copy_(uncode_by_torch(coded, to.numel(), bits)));
  const auto* const from = static_cast<const std::byte*>(coded.const_data_ptr());
  const auto uncode = [&](std::int64_t begin, std::size_t count) {
    kernels::uncode(from, static_cast<std::size_t>(begin), count, bits, array_of(to, begin));
  };
  const auto* const end = static_cast<const std::byte*>(to.const_data_ptr()) + to.nbytes();
  const bool is_in_place = from < end && from + coded.numel() > to.const_data_ptr();
  is_in_place ? uncode(0, static_cast<std::size_t>(to.numel())) : for_blocks(to.numel(), uncode);
}

}  // namespace zeropage
