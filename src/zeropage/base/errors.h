// Errors. Each has one sentence that names the failure, with sizes, and the remedy. An error loses nothing: every
// tensor keeps its state from before the operator. Programs that catch libtorch's errors catch these too.
#pragma once

#ifdef ZEROPAGE_WITHOUT_TORCH
#include <stdexcept>
#else
#include <c10/util/Exception.h>
#endif
#include <string>

namespace zeropage {

#ifdef ZEROPAGE_WITHOUT_TORCH
using ErrorOfTorch = std::runtime_error;
#else
using ErrorOfTorch = c10::Error;
#endif

class Error : public ErrorOfTorch {
 public:
  explicit Error(const std::string& message) : ErrorOfTorch(message) {}
};

/// A setting is unknown, malformed, or contradicts another one.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A tier's budget cannot hold what an operator or a tensor needs.
class BudgetError : public Error {
 public:
  using Error::Error;
};

/// A file could not be opened, grown, read or written as asked.
class DiskError : public Error {
 public:
  /// `code`: the system's errno, 0 if none. `path`: the file or directory, empty if unknown.
  explicit DiskError(const std::string& message, int code = 0, std::string path = {})
      : Error(message), code_(code), path_(std::move(path)) {}
  int code() const { return code_; }
  const std::string& path() const { return path_; }

 private:
  int code_;
  std::string path_;
};

/// A paged tensor was used where it cannot be: after its space was closed, in a forked child, on another device.
class AccessError : public Error {
 public:
  using Error::Error;
};

/// Ranks cannot go on together: one died or stalled, or they are no longer at the same operator.
class RankError : public Error {
 public:
  using Error::Error;
};

/// Called with an Error that leaves an operator or backward for PyTorch; may throw it in another form (Python's). One
/// per process.
using ErrorTranslator = void (*)(const Error& error);
void set_error_translator(ErrorTranslator translator);
/// Whether there is one: the program is written in another language, which watches its tensors itself.
bool has_error_translator();

/// Throws `error` again, in the form of the caller's language. A nonempty `before` and a colon precede its message.
[[noreturn]] void throw_translated(const Error& error, const std::string& before = "");

}  // namespace zeropage
