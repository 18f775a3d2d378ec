// Sums of squares in double precision, for norms over ranks. They do not depend on how the values are cut, on the
// number of threads, or on the processor: values are added in blocks, a block's in lanes, and the square of a float
// is exact in double precision.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "zeropage/kernels/formats.h"

namespace zeropage::kernels {

/// The sum for values that are given one after another. Formats are float32, bfloat16 and float16.
class Squares {
 public:
  static constexpr std::size_t kBlock = 4096;  // elements

  void add(const Array& values, std::size_t count);
  /// Adds the next block, whose sum is known. Only if all blocks before are complete.
  void add_block(double sum) { total_ += sum; }
  double sum() const;

  /// The sum of a block of at most kBlock values.
  static double of_block(const Array& values, std::size_t count);

 private:
  static constexpr std::size_t kLanes = 8;
  static void add_to(std::array<double, kLanes>& lanes, std::size_t first, const Array& values, std::size_t count);
  static double end(const std::array<double, kLanes>& lanes);

  double total_ = 0;                       // of complete blocks
  std::array<double, kLanes> lanes_ = {};  // of the last block
  std::size_t in_block_ = 0;               // values in it
};

}  // namespace zeropage::kernels
