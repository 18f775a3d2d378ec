// A gradient's norm before the program requests it: the norms requested of the leaf's gradients so far, and the norm
// computed for that reason when this gradient was made (rules/norms.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>

#include "zeropage/base/backoff.h"

namespace zeropage {

/// norm(gradient, ord), by norm or linalg_vector_norm, or as an element of _foreach_norm.
struct AskedNorm {
  double ord = 2;
  std::optional<c10::ScalarType> dtype = std::nullopt;
  bool of_list = false;

  bool operator==(const AskedNorm&) const = default;
};

/// The norms that the program requests of one leaf's gradients. After a norm that nothing used it pauses, longer each
/// time. Any thread may call it.
class NormHabit {
 public:
  void note(const AskedNorm& asked) {
    std::lock_guard lock(mutex_);
    asked_ = asked;
  }
  /// The norm that the program will probably request of the gradient made now.
  std::optional<AskedNorm> expected() {
    std::lock_guard lock(mutex_);
    return asked_ && backoff_.pass() ? asked_ : std::nullopt;
  }
  void hit() {
    std::lock_guard lock(mutex_);
    backoff_.hit();
  }
  void missed() {
    std::lock_guard lock(mutex_);
    backoff_.missed();
  }

 private:
  std::mutex mutex_;
  std::optional<AskedNorm> asked_;
  Backoff backoff_;  // by gradients
};

/// Equal as long as a segment's content is.
struct ContentMark {
  std::uint64_t changes = 0;  // of its pages
  std::size_t deferred = 0;   // operators that have yet to run

  bool operator==(const ContentMark&) const = default;
};

struct ForeseenNorm {
  struct Taken {
    AskedNorm asked;
    at::Tensor norm;     // undefined over ranks:
    double squares = 0;  // there the sum of squares of this rank's share
    ContentMark content;
    bool used = false;
  };
  std::shared_ptr<NormHabit> habit;  // of the leaf
  std::optional<Taken> taken;        // nullopt: none was expected

  ~ForeseenNorm() {
    if (taken && habit) taken->used ? habit->hit() : habit->missed();
  }
};

}  // namespace zeropage
