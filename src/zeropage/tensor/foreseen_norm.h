// What is known of a gradient's norm before it is asked for: what was asked of the leaf's gradients so far, and the
// norm that was therefore taken when this one was made (rules/norms.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>

#include "zeropage/base/backoff.h"

namespace zeropage {

/// norm(gradient, ord), by linalg_vector_norm or as an element of _foreach_norm.
struct AskedNorm {
  double ord = 2;
  std::optional<c10::ScalarType> dtype = std::nullopt;
  bool of_list = false;

  bool operator==(const AskedNorm&) const = default;
};

/// Of one leaf: what its gradients are asked for. Norms that are taken in vain make it pause, longer each time. Any
/// thread.
class NormHabit {
 public:
  void note(const AskedNorm& asked) {
    std::lock_guard lock(mutex_);
    asked_ = asked;
  }
  /// What the gradient that is made now will be asked for.
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
    at::Tensor norm;
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
