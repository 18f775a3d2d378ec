// What this thread is doing, said only when somebody asks: for errors that must tell where each of several ranks was.
#pragma once

#include <string>
#include <utility>

namespace zeropage {

class Doing {
 public:
  using Describe = std::string (*)(const void* context);

  /// While it lives, `describe(context)` says what the thread does.
  Doing(Describe describe, const void* context)
      : describe_(describe), context_(context), outer_(std::exchange(innermost_, this)) {}
  ~Doing() { innermost_ = outer_; }
  Doing(const Doing&) = delete;
  Doing& operator=(const Doing&) = delete;

  /// The innermost thing, or `otherwise`.
  static std::string now(std::string otherwise) {
    return innermost_ ? innermost_->describe_(innermost_->context_) : std::move(otherwise);
  }

 private:
  static inline thread_local const Doing* innermost_ = nullptr;
  Describe describe_;
  const void* context_;
  const Doing* outer_;
};

}  // namespace zeropage
