// The gradient of a weight in tiles, over ranks: computed when it is needed. Ranks that sum it take it range by
// range, in plain memory, so that it is stored nowhere. Any other reader has it computed into its pages first.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>

#include "zeropage/rules/tiles.h"

namespace zeropage {

class RowsToCome final : public Pending, public std::enable_shared_from_this<RowsToCome> {
 public:
  /// Writes each element of `tile`, the gradient's rows from `row` on: [n, columns], in plain memory or a page. It
  /// owns what it reads, which nothing else may write.
  using MakeRows = std::function<void(std::int64_t row, const at::Tensor& tile)>;

  /// Whether autograd gives the gradient for input `input` of the node that it runs to its leaf, and nothing else
  /// looks at it before. False for a weight's second use in one backward.
  static bool can_come(std::size_t input, const at::Tensor& weight);
  /// The operand, for MakeRows to keep: in plain memory that nothing else writes. `is_unshared`: nothing else has it.
  /// Undefined if it would have to be copied, and is larger than half of the weight.
  static at::Tensor kept(const at::Tensor& operand, bool is_unshared, const at::Tensor& weight);
  /// Whether the only reference to a tensor and its memory is this one.
  static bool is_unshared(const at::Tensor& tensor) {
    return tensor.use_count() == 1 && tensor.has_storage() && tensor.storage().use_count() == 1;
  }
  /// A gradient like `weight`, this rank's own.
  static at::Tensor make(const at::Tensor& weight, MakeRows make_rows);
  /// Computes this thread's latest into its pages unless it is `taken`: its leaf waits for another use of the weight,
  /// and what it keeps could not die before.
  static void settle(const StorageSegment* taken);

  RowsToCome(const at::Tensor& gradient, MakeRows make_rows);
  void complete() override;
  bool add_to(StorageSegment&, const StorageSegment&) override { return false; }
  bool comes_in_parts() const override { return true; }
  /// Computes rows in order, a tile at once: a few outside the budget, in at most an eighth of its size.
  void write_part(std::size_t begin, const at::Tensor& into) override;

 private:
  void find(std::int64_t row);

  StorageSegment* const segment_;  // owns this
  const std::vector<std::int64_t> sizes_, strides_;
  const at::TensorOptions options_;
  const std::int64_t rows_, columns_, tile_rows_;
  MakeRows make_rows_;
  bool is_completing_ = false;
  at::Tensor tile_;  // the latest
  std::int64_t tile_begin_ = 0, tile_end_ = 0;
};

}  // namespace zeropage
