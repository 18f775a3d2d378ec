// Lazy products: products larger than memory, computed when an operator needs them. `linear` over a huge vocabulary
// gives logits that a loss can compute in parts (vocabulary_loss.cpp), and that a program may still read.
//
// The product is an ordinary tensor whose storage holds its operands instead of data. Its key set carries the paged
// key, so that operators reach the fallback first. Views, conversions and copies of whole rows stay lazy; every other
// operator computes it, once, in ordinary memory. It is lazy only while autograd records: then programs reach its
// bytes through operators. Its operands must not change: an update of the weight before its computation is an error.
//
// Over ranks, one of them may read what others do not, such as rank 0 for a log, and none may gather alone. The
// product is computed at once there, and kept in pages.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "zeropage/rules/blocked_product.h"
#include "zeropage/rules/call.h"

namespace zeropage {

/// The weak pointer to a graph's node. torch 2.11 and 2.13 hold nodes by different pointers.
template <class Pointer>
struct WeakOf;
template <class T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <class T>
struct WeakOf<c10::intrusive_ptr<T>> {
  using type = c10::weak_intrusive_ptr<T>;
};
using NodePointer = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;
using WeakNode = typename WeakOf<NodePointer>::type;

class LazyProduct {
 public:
  /// x [1, t, k]; weight [outputs, k], paged and contiguous; bias [outputs] or undefined. With their autograd
  /// history.
  struct Operands {
    at::Tensor x, weight, bias;
    at::ScalarType dtype;                       // of the result
    c10::intrusive_ptr<BlockedProduct> stored;  // computed already, in pages; null: it is not
  };

  /// Whether a product is so large that it should stay lazy. Ranks decide alike, whatever their rows: backward takes
  /// the weight's pages for a loss in parts, or later for the product.
  static bool is_worth_it(const at::Tensor& x, const at::Tensor& weight, at::ScalarType dtype);
  /// Makes a lazy product [1, t, outputs] without autograd. The caller then calls record().
  static at::Tensor make(Operands operands);
  /// Remembers the graph's node that recorded the product.
  static void record(const at::Tensor& product);
  /// The lazy product behind `tensor`, if it is not computed yet; else null.
  static LazyProduct* of(const at::TensorBase& tensor);
  /// The same, also if it was stored and has been read since: whether a rank has read its logits decides nothing.
  static LazyProduct* stored_of(const at::TensorBase& tensor);

  /// The differentiable operands whose product gives the rows of `view`, in its order: [t, outputs] as a matrix.
  /// Empty if `view` has no whole rows, or if their product would differ from `view`: for autograd, for hooks, or, if
  /// tiling is exact, in its bits.
  std::optional<Operands> rows_of(const at::Tensor& view);
  /// Lets backward run `node` where it would run the product's: autograd takes the node of the latest operator first.
  /// Over ranks, those that compute a loss in parts and those that do not then take the weight's pages at one place.
  void give_its_turn(torch::autograd::Node& node) const;
  /// The dtype of its computation.
  at::ScalarType dtype() const { return dtype_; }
  /// Computes the product: `tensor`, and all that share its storage, are ordinary from now on.
  static void look(const at::Tensor& tensor);

  /// Whether a hook sees the gradients at a node of the graph.
  static bool is_hooked(torch::autograd::Node& node);

  /// Runs a call on lazy products. True: it did. False: it has computed all products that the call needs.
  static bool run(Call& call);

 private:
  /// The state of one operand at the call.
  struct Mark {
    explicit Mark(const at::Tensor& tensor);
    bool operator==(const Mark&) const = default;

    std::int64_t version = 0;
    std::uint64_t writes = 0;  // of a paged operand, also through .data
    const c10::StorageImpl* storage = nullptr;
    bool requires_grad = false;
  };

  explicit LazyProduct(Operands operands);
  static void destroy(void* context) { delete static_cast<LazyProduct*>(context); }
  static LazyProduct* at(const at::TensorBase& tensor);
  void check_unchanged() const;
  bool is_view_of_this(const at::Tensor& view) const;

  Operands operands_;  // under the mutex; empty once it is computed, unless it is stored
  const Mark x_, weight_, bias_;
  const at::ScalarType dtype_;
  const std::int64_t rows_, outputs_;
  const bool is_stored_;
  const c10::Stream stream_;  // of the call
  std::mutex mutex_;
  std::optional<WeakNode> node_;
  std::atomic<bool> is_made_ = false;
  at::Tensor result_;  // owns the memory
};

}  // namespace zeropage
