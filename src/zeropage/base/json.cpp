#include "zeropage/base/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace zeropage {
namespace {

constexpr int kDeepest = 500;  // arrays and objects inside one another

/// Bytes of the UTF-8 character at the begin of `text`; 0 if there is none (RFC 3629: no surrogates, no long forms).
std::size_t character_at(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto follows = [&](std::size_t i, unsigned from = 0x80, unsigned to = 0xbf) {
    return byte(i) >= from && byte(i) <= to;
  };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return follows(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    return follows(1, lead == 0xe0 ? 0xa0 : 0x80, lead == 0xed ? 0x9f : 0xbf) && follows(2) ? 3 : 0;
  }
  if (lead < 0xf0 || lead > 0xf4) return 0;
  return follows(1, lead == 0xf0 ? 0x90 : 0x80, lead == 0xf4 ? 0x8f : 0xbf) && follows(2) && follows(3) ? 4 : 0;
}

void append_character(std::string& text, std::uint32_t code) {
  const auto put = [&](std::uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (code < 0x80) return put(code);
  if (code < 0x800) return put(0xc0 | code >> 6), put(0x80 | (code & 63));
  if (code < 0x10000) return put(0xe0 | code >> 12), put(0x80 | (code >> 6 & 63)), put(0x80 | (code & 63));
  put(0xf0 | code >> 18), put(0x80 | (code >> 12 & 63)), put(0x80 | (code >> 6 & 63)), put(0x80 | (code & 63));
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json parse() {
    Json value = parse_value();
    skip_blanks();
    if (at_ != text_.size()) fail("more text after the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    const std::string_view before = text_.substr(0, at_);
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const std::size_t begin = before.rfind('\n') == before.npos ? 0 : before.rfind('\n') + 1;
    throw JsonError(fmt::format("{} at line {}, column {}", what, line, at_ - begin + 1));
  }

  void skip_blanks() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  bool take(std::string_view token) {
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }

  /// Skips blanks, and takes the character if it is next.
  bool take_next(char wanted) {
    skip_blanks();
    return take({&wanted, 1});
  }

  void expect(char wanted) {
    if (!take_next(wanted)) fail(fmt::format("'{}' is missing", wanted));
  }

  Json parse_value() {
    skip_blanks();
    if (at_ == text_.size()) fail("a value is missing");
    if (text_[at_] == '{') return parse_object();
    if (text_[at_] == '[') return parse_array();
    if (text_[at_] == '"') return parse_text();
    if (take("null")) return {};
    if (take("true")) return true;
    if (take("false")) return false;
    if (take("NaN")) return std::numeric_limits<double>::quiet_NaN();
    if (take("Infinity")) return std::numeric_limits<double>::infinity();
    if (take("-Infinity")) return -std::numeric_limits<double>::infinity();
    return parse_number();
  }

  Json parse_object() {
    const Deeper deeper(*this);
    Json::Object object;
    expect('{');
    if (take_next('}')) return object;
    do {
      skip_blanks();
      if (at_ == text_.size() || text_[at_] != '"') fail("a key in quotes is missing");
      std::string key = parse_text();
      expect(':');
      object.emplace_back(std::move(key), parse_value());
    } while (take_next(','));
    expect('}');
    return object;
  }

  Json parse_array() {
    const Deeper deeper(*this);
    Json::Array array;
    expect('[');
    if (take_next(']')) return array;
    do array.push_back(parse_value());
    while (take_next(','));
    expect(']');
    return array;
  }

  bool take_digits() {
    const std::size_t begin = at_;
    at_ = std::min(text_.find_first_not_of("0123456789", at_), text_.size());
    return at_ > begin;
  }

  Json parse_number() {
    const std::size_t begin = at_;
    const bool is_negative = take("-");
    const bool has_leading_zero = take("0");
    if (!has_leading_zero && !take_digits()) fail("a value is missing");
    bool is_integer = true, is_small = false;
    if (take(".")) {
      is_integer = false;
      if (!take_digits()) fail("a digit is missing");
    }
    if (take("e") || take("E")) {
      is_integer = false;
      is_small = take("-");
      if (!is_small) take("+");
      if (!take_digits()) fail("a digit is missing");
    }
    const char *from = text_.data() + begin, *to = text_.data() + at_;
    std::int64_t integer = 0;
    if (is_integer && std::from_chars(from, to, integer).ec == std::errc()) return integer;
    double number = 0;
    if (std::from_chars(from, to, number).ec == std::errc()) return number;
    const double edge = is_small ? 0.0 : std::numeric_limits<double>::infinity();
    return is_negative ? -edge : edge;
  }

  std::string parse_text() {
    std::string text;
    ++at_;
    while (true) {
      if (at_ == text_.size()) fail("a text has no end");
      const char next = text_[at_];
      if (take("\"")) return text;
      if (static_cast<unsigned char>(next) < 0x20) fail("a control character in a text");
      if (take("\\")) {
        parse_escape(text);
        continue;
      }
      const std::size_t bytes = character_at(text_.substr(at_));
      if (bytes == 0) fail("bytes that are not UTF-8");
      text.append(text_, at_, bytes);
      at_ += bytes;
    }
  }

  void parse_escape(std::string& text) {
    static constexpr std::string_view kNames = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    if (at_ == text_.size()) fail("a text has no end");
    if (const std::size_t known = kNames.find(text_[at_]); known != kNames.npos) {
      ++at_;
      text.push_back(kMeanings[known]);
      return;
    }
    if (!take("u")) fail("an unknown escape in a text");
    std::uint32_t code = parse_hex();
    if (code >= 0xd800 && code < 0xdc00 && take("\\u")) {
      const std::uint32_t low = parse_hex();
      if (low >= 0xdc00 && low < 0xe000)
        return append_character(text, 0x10000 + ((code - 0xd800) << 10) + low - 0xdc00);
      append_character(text, 0xfffd);
      code = low;
    }
    append_character(text, code >= 0xd800 && code < 0xe000 ? 0xfffd : code);
  }

  std::uint32_t parse_hex() {
    const std::string_view digits = text_.substr(at_, 4);
    std::uint32_t code = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (digits.size() != 4 || error != std::errc() || end != digits.data() + 4) fail("four hex digits are missing");
    at_ += 4;
    return code;
  }

  struct Deeper {
    explicit Deeper(Parser& of) : parser(of) {
      if (++parser.depth_ > kDeepest) parser.fail("too many values inside one another");
    }
    ~Deeper() { --parser.depth_; }
    Parser& parser;
  };

  const std::string_view text_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

void append_text(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    const std::size_t bytes = character_at(text);
    if (bytes == 0) throw JsonError("a name is not UTF-8, so JSON cannot hold it");
    const char first = text[0];
    if (first == '"' || first == '\\') {
      out += '\\';
      out += first;
    } else if (static_cast<unsigned char>(first) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(first));
    } else {
      out += text.substr(0, bytes);
    }
    text.remove_prefix(bytes);
  }
  out += '"';
}

void append_number(std::string& out, double number) {
  if (std::isnan(number)) {
    out += "NaN";
  } else if (std::isinf(number)) {
    out += number > 0 ? "Infinity" : "-Infinity";
  } else {
    const std::string text = fmt::format("{}", number);  // the shortest that reads back equal
    out += text;
    if (text.find_first_of(".e") == text.npos) out += ".0";  // stays a float in Python
  }
}

void append(std::string& out, const Json& value) {
  const auto list = [&](char open, const auto& items, char end, auto&& append_item) {
    out += open;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += ',';
      append_item(items[i]);
    }
    out += end;
  };
  if (value.is_null()) {
    out += "null";
  } else if (value.is_flag()) {
    out += value.flag() ? "true" : "false";
  } else if (value.is_integer()) {
    out += std::to_string(value.integer());
  } else if (value.is_number()) {
    append_number(out, value.number());
  } else if (value.is_text()) {
    append_text(out, value.text());
  } else if (value.is_array()) {
    list('[', value.array(), ']', [&](const Json& item) { append(out, item); });
  } else {
    list('{', value.object(), '}', [&](const auto& member) {
      append_text(out, member.first);
      out += ':';
      append(out, member.second);
    });
  }
}

}  // namespace

Json::Json(std::uint64_t value) : value_(static_cast<std::int64_t>(value)) {
  if (integer() < 0) throw JsonError(fmt::format("{} is too large for an integer of JSON here", value));
}

Json Json::parse(std::string_view text) { return Parser(text).parse(); }

std::string Json::dump() const {
  std::string text;
  append(text, *this);
  return text;
}

template <class Kind>
const Kind& Json::get(const char* wanted) const {
  const Kind* const value = std::get_if<Kind>(&value_);
  if (!value) throw JsonError(fmt::format("a value is not {}", wanted));
  return *value;
}
template const bool& Json::get<bool>(const char*) const;
template const std::int64_t& Json::get<std::int64_t>(const char*) const;
template const std::string& Json::get<std::string>(const char*) const;
template const Json::Array& Json::get<Json::Array>(const char*) const;
template const Json::Object& Json::get<Json::Object>(const char*) const;

std::uint64_t Json::count() const {
  if (integer() < 0) throw JsonError(fmt::format("{} is less than 0", integer()));
  return static_cast<std::uint64_t>(integer());
}

double Json::number() const { return is_integer() ? static_cast<double>(integer()) : get<double>("a number"); }

const Json* Json::find(std::string_view key) const {
  const Object& members = object();
  const auto found = std::find_if(members.rbegin(), members.rend(), [&](const auto& m) { return m.first == key; });
  return found == members.rend() ? nullptr : &found->second;
}

const Json& Json::at(std::string_view key) const {
  const Json* const found = find(key);
  if (!found) throw JsonError(fmt::format("\"{}\" is missing", key));
  return *found;
}

}  // namespace zeropage
