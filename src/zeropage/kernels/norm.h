// The 2-norm of float32 values in parts, with the bits of PyTorch's kernel for the CPU.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace zeropage::kernels {

/// Adds squares as PyTorch's norm_kernel (aten/src/ATen/native/cpu/ReduceOpsKernel.cpp) does on a contiguous float32
/// tensor: lane j of a vector sums elements j, j + lanes, …; at the end the lanes are added in order, then the last
/// size % lanes elements. The compiler of PyTorch has chosen the form for each processor.
class NormInOrder {
 public:
  struct Form {
    std::size_t lanes;  // at most kMostLanes
    bool fused;         // a lane's product and sum are rounded once
    std::size_t tail;   // of the last elements, groups of so many are rounded twice, the rest once; 0: all once
  };
  static constexpr std::size_t kMostLanes = 16;

  /// Every form that this processor can run.
  static std::vector<Form> forms();

  explicit NormInOrder(Form form) : form_(form) {}
  /// Adds the next `count` values; a multiple of kMostLanes, except in the last call.
  void add(const float* values, std::size_t count);
  /// The norm of all values.
  float norm() const;

 private:
  Form form_;
  std::array<float, kMostLanes> lanes_ = {};
  std::array<float, kMostLanes> rest_ = {};
  std::size_t rest_count_ = 0;
};

}  // namespace zeropage::kernels
