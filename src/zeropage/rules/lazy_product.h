// Products that are larger than memory, made when an operator asks for them: `linear` over a huge vocabulary gives
// logits that a loss can take in parts (vocabulary_loss.cpp), and that a program may still ask for.
//
// The product is an ordinary tensor whose storage holds what it takes to make it instead of data, and whose key set
// carries the paged key, so that operators come to the fallback first. Views, conversions and copies of whole rows
// stay lazy; every other operator makes it, once, in ordinary memory. It is lazy only while autograd records: then
// programs reach its bytes through operators. What it is made of must be as it was: if the weight was updated
// meanwhile, that is an error.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "zeropage/rules/call.h"

namespace zeropage {

/// Nodes of the graph are held by another kind of pointer in torch 2.11 than in 2.13.
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
  /// x [1, t, k], weight [outputs, k], paged and contiguous, bias [outputs] or undefined: as autograd knows them.
  struct Operands {
    at::Tensor x, weight, bias;
    at::ScalarType dtype;  // of the result
  };

  /// Whether a product is too large to be made before an operator asks for it.
  static bool is_worth_it(const at::Tensor& x, const at::Tensor& weight, at::ScalarType dtype);
  /// [1, t, outputs]. Without autograd: the caller tells the node that records the product by record().
  static at::Tensor make(Operands operands);
  static void record(const at::Tensor& product);
  /// What `tensor` is made of, if it is lazy and was not made; else null.
  static LazyProduct* of(const at::TensorBase& tensor);

  /// The operands whose product are the rows that `view` consists of, [t, outputs] when they are seen as a matrix, in
  /// its order. Nothing if these are not whole rows, or if computing them anew would not be what `view` is: to
  /// autograd, to hooks, or, where tiling is exact, to the bit. Differentiable.
  std::optional<Operands> rows_of(const at::Tensor& view);
  /// In which it is computed.
  at::ScalarType dtype() const { return dtype_; }
  /// `tensor` and all that share its storage are ordinary from now on.
  static void look(const at::Tensor& tensor);

  /// Whether something sees what goes through a node of the graph on its way.
  static bool is_hooked(torch::autograd::Node& node);

  /// A call of an operator on lazy products: true if it was run, else all that it needs have been made.
  static bool run(Call& call);

 private:
  /// One operand as it was.
  struct Mark {
    explicit Mark(const at::Tensor& tensor);
    bool operator==(const Mark&) const = default;

    std::int64_t version = 0;
    std::uint64_t writes = 0;  // also through .data, of what is paged
    const c10::StorageImpl* storage = nullptr;
    bool requires_grad = false;
  };

  explicit LazyProduct(Operands operands);
  static void destroy(void* context) { delete static_cast<LazyProduct*>(context); }
  void check_unchanged() const;
  bool is_view_of_this(const at::Tensor& view) const;

  Operands operands_;  // under the mutex; nothing when it is made
  const Mark x_, weight_, bias_;
  const at::ScalarType dtype_;
  const std::int64_t rows_, outputs_;
  const c10::Stream stream_;  // on which it would have been made
  std::mutex mutex_;
  std::optional<WeakNode> node_;
  std::atomic<bool> is_made_ = false;
  at::Tensor result_;  // owns the memory
};

}  // namespace zeropage
