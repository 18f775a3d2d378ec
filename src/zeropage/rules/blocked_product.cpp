#include "zeropage/rules/blocked_product.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>

#include "zeropage/base/units.h"
#include "zeropage/rules/tiled_product.h"

namespace zeropage {
namespace {

/// Losses compute in float32 at least.
std::size_t item_bytes(at::ScalarType dtype) { return std::max(c10::elementSize(dtype), sizeof(float)); }

/// The columns of the widest block. Four arrays of a block's size may be in memory at once, with the tiles of the
/// weight and its gradient.
std::int64_t widest(std::int64_t rows, const at::Tensor& weight, at::ScalarType dtype) {
  const std::size_t column_bytes = std::max<std::size_t>(rows, 1) * item_bytes(dtype);
  const std::size_t limit = paged_segment(weight).domain()->cache->frame_limit();
  const auto fitting = static_cast<std::int64_t>(round_down(limit / 12 / column_bytes, kFewestColumns));
  return std::min(std::max(fitting, kFewestColumns), weight.size(0));
}

/// How many of a tile's columns to compute next, if `left` are to come and the block has room for `room`. Libraries
/// compute few columns with other code, so the piece at the block's end may reach into the next one.
std::int64_t piece_of(std::int64_t left, std::int64_t room) {
  constexpr std::int64_t kFew = kKernelColumns;
  if (left <= room) return left;
  const std::int64_t beyond = left - room;
  if (beyond < kFew) return room < 2 * kFew ? left : room - kFew;
  if (room >= kFew) return room;
  return beyond < 2 * kFew ? left : room + kFew;
}
constexpr std::int64_t kMostBeyond = 3 * kKernelColumns;  // of a piece that reaches into the next block

}  // namespace

bool BlockedProduct::fits(const at::Tensor& weight, at::ScalarType dtype) {
  return 4 * weight.size(0) * item_bytes(dtype) <= paged_segment(weight).domain()->cache->frame_limit() / 2;
}

c10::intrusive_ptr<BlockedProduct> BlockedProduct::make(const at::Tensor& x, const at::Tensor& weight,
                                                        const at::Tensor& bias) {
  const auto& domain = paged_segment(weight).domain();
  const std::int64_t rows = x.size(1), columns = weight.size(0);
  // A device tier for activations may be too small: then it has the gradients' tier.
  const bool stays = domain->tiers[static_cast<int>(Role::activation)] == TierChoice::device;
  const at::Tensor pages = make_paged(domain, std::max<std::int64_t>(rows, 1) * columns, 1, x.dtype(),
                                      stays ? Role::gradient : Role::activation, {.alone = true, .is_local = true});
  auto made = c10::make_intrusive<BlockedProduct>(pages, rows, columns, widest(rows, weight, x.scalar_type()));
  const at::Tensor added = in_memory(bias);
  if (rows == 0) {  // other ranks may have rows
    for_each_tile(Rows(weight), Access::read, [](std::int64_t, const at::Tensor&) {});
    return made;
  }
  const at::Tensor input = in_memory(x)[0];
  const Scratch scratch(domain, rows * (made->width_ + kMostBeyond), x.scalar_type());
  const auto matrix = [&](std::int64_t begin, std::int64_t width) {
    return scratch.tensor().narrow(0, rows * begin, rows * width).view({rows, width});
  };
  auto block = made->blocks_.begin();
  std::int64_t filled = 0;  // columns of the block
  const auto write_full = [&] {
    if (filled < block->columns) return;
    made->write(*block, matrix(0, block->columns));
    ++block, filled = 0;
  };
  for_each_tile(Rows(weight), Access::read, [&](std::int64_t row, const at::Tensor& tile) {
    for (std::int64_t at = 0; at < tile.size(0);) {
      const std::int64_t room = block->columns - filled, n = piece_of(tile.size(0) - at, room);
      const at::Tensor piece = tile.narrow(0, at, n);
      const at::Tensor of_piece = added.defined() ? added.narrow(0, row + at, n) : at::Tensor();
      const at::Tensor into = matrix(0, block->columns);
      if (n <= room) {
        multiply_rows(into.narrow(1, filled, n), input, piece, of_piece);
        filled += n;
      } else {
        const at::Tensor values = matrix(made->width_, n);
        multiply_rows(values, input, piece, of_piece);
        into.narrow(1, filled, room).copy_(values.narrow(1, 0, room));
        filled += room;
        write_full();
        filled = n - room;
        matrix(0, block->columns).narrow(1, 0, filled).copy_(values.narrow(1, room, filled));
      }
      write_full();
      at += n;
    }
  });
  return made;
}

BlockedProduct::BlockedProduct(at::Tensor pages, std::int64_t rows, std::int64_t columns, std::int64_t width)
    : pages_(std::move(pages)), rows_(rows), columns_(columns), width_(width) {
  for (std::int64_t begin = 0; begin < columns;) {
    std::int64_t n = std::min(width, columns - begin);
    const std::int64_t left = columns - begin - n;
    if (left > 0 && left < kFewestColumns && n > kFewestColumns) n -= kFewestColumns;
    blocks_.push_back({begin, n});
    begin += n;
  }
}

void BlockedProduct::write(const Block& block, const at::Tensor& values) const {
  for_each_tile(
      Rows::elements(pages_, rows_ * block.begin, values.numel()), Access::overwrite,
      [&](std::int64_t at, at::Tensor page) { page.copy_(values.view({-1, 1}).narrow(0, at, page.size(0))); });
}

void BlockedProduct::read(const Block& block, std::int64_t first, std::int64_t n, const at::Tensor& staging,
                          at::Tensor into) const {
  const at::Tensor flat = staging.narrow(0, 0, n * block.columns);
  for_each_tile(
      Rows::elements(pages_, rows_ * block.begin + first * block.columns, flat.numel()), Access::read,
      [&](std::int64_t at, const at::Tensor& page) { flat.narrow(0, at, page.size(0)).copy_(page.squeeze(1)); });
  into.copy_(flat.view({n, block.columns}));
}

void BlockedProduct::read_rows(std::int64_t first, const at::Tensor& staging, const at::Tensor& into) const {
  if (into.size(0) == 0) return;
  for (const Block& block : blocks_) {
    read(block, first, into.size(0), staging, into.narrow(1, block.begin, block.columns));
  }
}

at::Tensor BlockedProduct::whole() const {
  const auto options = pages_.options().requires_grad(false);
  at::Tensor values = at::empty({rows_, columns()}, options);
  read_rows(0, at::empty(rows_ * width_, options), values);
  return values;
}

bool BlockedProduct::equals(const at::Tensor& values) const {
  if (rows_ == 0) return true;
  const auto bits = values.itemsize() == 8 ? at::kLong : values.itemsize() == 4 ? at::kInt : at::kShort;
  const auto options = pages_.options().requires_grad(false);
  const at::Tensor staging = at::empty(rows_ * width_, options), room = at::empty(rows_ * width_, options);
  return std::ranges::all_of(blocks_, [&](const Block& block) {
    at::Tensor stored = room.narrow(0, 0, rows_ * block.columns).view({rows_, block.columns});
    read(block, 0, rows_, staging, stored);
    const at::Tensor there = values.narrow(1, block.begin, block.columns);
    return stored.to(values.scalar_type()).view(bits).equal(there.view(bits));
  });
}

}  // namespace zeropage
