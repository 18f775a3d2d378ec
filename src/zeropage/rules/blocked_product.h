// The result of a product with a tiled weight in pages of its own, for readers that take it in parts.
#pragma once

#include <torch/custom_class.h>

#include <vector>

#include "zeropage/rules/tiles.h"

namespace zeropage {

/// A product [rows, columns] in blocks of columns, as wide as memory permits: readers of a few rows use a part of
/// each page that they load.
class BlockedProduct : public torch::CustomClassHolder {
 public:
  struct Block {
    std::int64_t begin, columns;
  };

  /// Whether memory holds a few rows of it, and what a loss needs in addition. The same for any number of rows.
  static bool fits(const at::Tensor& weight, at::ScalarType dtype);
  /// Computes x [1, rows, k] · weightᵀ + bias; weight [columns, k], paged and contiguous. Takes the weight's tiles in
  /// one walk, which is the same for any x, also without rows. Throws BudgetError.
  static c10::intrusive_ptr<BlockedProduct> make(const at::Tensor& x, const at::Tensor& weight,
                                                 const at::Tensor& bias);
  /// For what make() stored in `pages`, with the width of its blocks.
  BlockedProduct(at::Tensor pages, std::int64_t rows, std::int64_t columns, std::int64_t width);

  const at::Tensor& pages() const { return pages_; }
  at::ScalarType dtype() const { return pages_.scalar_type(); }
  const std::vector<Block>& blocks() const { return blocks_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  /// The columns of the widest block.
  std::int64_t width() const { return width_; }

  /// Reads rows [first, first + n) of a block into `into`, [n, block.columns], through `staging` of as many elements.
  void read(const Block& block, std::int64_t first, std::int64_t n, const at::Tensor& staging, at::Tensor into) const;
  /// Reads rows of all blocks into `into`, [n, columns], through `staging` of n * width() elements.
  void read_rows(std::int64_t first, const at::Tensor& staging, const at::Tensor& into) const;
  /// All of it in ordinary memory, [rows, columns].
  at::Tensor whole() const;
  /// Whether `values`, [rows, columns] in ordinary memory, has the same bits as it has in their dtype.
  bool equals(const at::Tensor& values) const;

 private:
  void write(const Block& block, const at::Tensor& values) const;

  const at::Tensor pages_;
  const std::int64_t rows_, columns_, width_;
  std::vector<Block> blocks_;
};

}  // namespace zeropage
