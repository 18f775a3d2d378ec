// Describes what this thread is doing. The text is only made when an error needs it, to tell where each of several
// ranks was.
#pragma once

#include <string>
#include <utility>

namespace zeropage {

class CurrentActivity {
 public:
  using Describe = std::string (*)(const void* context);

  /// While it lives, `describe(context)` describes the thread's activity.
  CurrentActivity(Describe describe, const void* context)
      : describe_(describe), context_(context), outer_(std::exchange(innermost_, this)) {}
  ~CurrentActivity() { innermost_ = outer_; }
  CurrentActivity(const CurrentActivity&) = delete;
  CurrentActivity& operator=(const CurrentActivity&) = delete;

  /// The description of the innermost activity, or `otherwise`.
  static std::string now(std::string otherwise) { return innermost_ ? innermost_->describe() : std::move(otherwise); }
  /// This thread's innermost activity, or null. Another thread may call describe() on it while this one is blocked.
  static const CurrentActivity* innermost() { return innermost_; }
  std::string describe() const { return describe_(context_); }

 private:
  static inline thread_local const CurrentActivity* innermost_ = nullptr;
  Describe describe_;
  const void* context_;
  const CurrentActivity* outer_;
};

}  // namespace zeropage
