// JSON (RFC 8259), for checkpoints and settings files. It also reads and writes NaN and Infinity, as Python's json
// does. Integers are exact within 64 bits, and other numbers are doubles that read back equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "zeropage/base/errors.h"

namespace zeropage {

/// A text is no JSON, or a value is not of the kind that the caller needs.
class JsonError : public Error {
 public:
  using Error::Error;
};

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in order; the last of equal keys counts

  Json() = default;  // null
  Json(bool value) : value_(value) {}
  Json(int value) : value_(static_cast<std::int64_t>(value)) {}
  Json(std::int64_t value) : value_(value) {}
  Json(std::uint64_t value);  // throws JsonError beyond the range of std::int64_t
  Json(double value) : value_(value) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}

  /// Throws JsonError with line and column. Text must be UTF-8. A lone surrogate becomes U+FFFD.
  static Json parse(std::string_view text);
  /// The text, without blanks. Throws JsonError for text that is not UTF-8.
  std::string dump() const;

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool is_flag() const { return std::holds_alternative<bool>(value_); }
  bool is_integer() const { return std::holds_alternative<std::int64_t>(value_); }
  bool is_number() const { return is_integer() || std::holds_alternative<double>(value_); }
  bool is_text() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }

  // Each throws JsonError for a value of another kind.
  bool flag() const { return get<bool>("true or false"); }
  std::int64_t integer() const { return get<std::int64_t>("an integer"); }
  std::uint64_t count() const;  // an integer that is not negative
  double number() const;        // an integer too
  const std::string& text() const { return get<std::string>("text"); }
  const Array& array() const { return get<Array>("an array"); }
  const Object& object() const { return get<Object>("an object"); }

  /// The value of a key of an object; null if there is none.
  const Json* find(std::string_view key) const;
  /// The same. Throws JsonError if there is none.
  const Json& at(std::string_view key) const;

 private:
  template <class Kind>
  const Kind& get(const char* wanted) const;

  std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object> value_ = nullptr;
};

}  // namespace zeropage
