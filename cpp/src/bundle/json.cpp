#include "bundle/json.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "formatting.h"

namespace tide {
namespace {

constexpr int kMaxDepth = 100;  // of lists and objects in each other
constexpr std::int64_t kMaxPlaces = std::int64_t{1} << 60;  // of a number: more than a text has characters
constexpr std::string_view kWhitespace = " \t\n\r";

struct Invalid {};

// The bytes of the character that begins a text; 0: it is not valid UTF-8.
std::size_t character_size(std::string_view text) {
  auto const byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned const first = byte(0);
  if (first < 0x80) return 1;
  std::size_t const size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || size > text.size()) return 0;
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  unsigned const second = byte(1);  // no longer form than needed, no half of a surrogate pair, nothing above U+10FFFF
  bool const wrong = (first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
                     (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F);
  return wrong ? 0 : size;
}

void append_utf8(std::string& text, std::uint32_t code) {
  auto const put = [&](std::uint32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xC0 | code >> 6);
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
  }
  put(0x80 | (code & 0x3F));
}

// Whether a number that is out of a float's range is below it, and not above: by the place of its first digit but 0.
bool is_tiny(std::string_view digits) {
  std::size_t const end = std::min(digits.find_first_of("eE"), digits.size());
  std::size_t const point = std::min(digits.find('.'), end);
  std::size_t const first = digits.find_first_of("123456789");
  std::int64_t exponent = 0;
  if (end != digits.size()) {
    std::string_view const written = digits.substr(end + (digits[end + 1] == '+' ? 2 : 1));
    auto const read = std::from_chars(written.data(), written.data() + written.size(), exponent);
    if (read.ec != std::errc() || exponent != std::clamp(exponent, -kMaxPlaces, kMaxPlaces)) return written[0] == '-';
  }
  return exponent + static_cast<std::int64_t>(point) < static_cast<std::int64_t>(first);
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json whole_text() {
    Json const value = parsed(0);
    skip_whitespace();
    if (at_ != text_.size()) throw Invalid();
    return value;
  }

 private:
  char peek() const {
    if (at_ == text_.size()) throw Invalid();
    return text_[at_];
  }

  void skip_whitespace() {
    while (at_ < text_.size() && kWhitespace.find(text_[at_]) != std::string_view::npos) ++at_;
  }

  void expect(std::string_view token) {
    if (text_.substr(at_, token.size()) != token) throw Invalid();
    at_ += token.size();
  }

  Json parsed(int depth) {
    skip_whitespace();
    Json value;
    value.begin = at_;
    switch (peek()) {
      case 'n':
        expect("null");
        break;
      case 't':
      case 'f':
        value.kind = Json::Kind::boolean;
        value.boolean = peek() == 't';
        expect(value.boolean ? "true" : "false");
        break;
      case '"':
        value.kind = Json::Kind::text;
        value.text = parsed_text();
        break;
      case '[':
      case '{':
        if (depth == kMaxDepth) throw Invalid();
        value.kind = peek() == '[' ? Json::Kind::list : Json::Kind::object;
        read_entries(value, depth + 1);
        break;
      default:
        read_number(value);
    }
    value.end = at_;
    return value;
  }

  // Reads the entries of a list or an object.
  void read_entries(Json& value, int depth) {
    bool const is_list = value.kind == Json::Kind::list;
    char const close = is_list ? ']' : '}';
    ++at_;
    skip_whitespace();
    if (peek() == close) {
      ++at_;
      return;
    }
    for (;;) {
      if (is_list) {
        value.list.push_back(parsed(depth));
      } else {
        skip_whitespace();
        if (peek() != '"') throw Invalid();
        std::string name = parsed_text();
        skip_whitespace();
        expect(":");
        auto const [entry, is_new] = value.object.try_emplace(std::move(name));
        if (!is_new) throw Invalid();
        entry->second = parsed(depth);
      }
      skip_whitespace();
      if (peek() == close) break;
      expect(",");
    }
    ++at_;
  }

  std::string parsed_text() {
    ++at_;
    std::string text;
    while (peek() != '"') {
      if (peek() == '\\') {
        ++at_;
        read_escape(text);
        continue;
      }
      std::size_t const size = character_size(text_.substr(at_));
      if (size == 0 || static_cast<unsigned char>(peek()) < 0x20) throw Invalid();
      text += text_.substr(at_, size);
      at_ += size;
    }
    ++at_;
    return text;
  }

  void read_escape(std::string& text) {
    constexpr std::string_view escapes = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
    char const escape = peek();
    ++at_;
    if (escape != 'u') {
      std::size_t const index = escapes.find(escape);
      if (index == std::string_view::npos) throw Invalid();
      text += meanings[index];
      return;
    }
    std::uint32_t code = parsed_hex();
    if (code >= 0xD800 && code < 0xDC00) {  // the first half of a surrogate pair
      expect("\\u");
      std::uint32_t const second = parsed_hex();
      if (second < 0xDC00 || second > 0xDFFF) throw Invalid();
      code = 0x10000 + ((code - 0xD800) << 10) + (second - 0xDC00);
    } else if (code >= 0xDC00 && code <= 0xDFFF) {
      throw Invalid();
    }
    append_utf8(text, code);
  }

  std::uint32_t parsed_hex() {
    std::uint32_t code = 0;
    if (text_.size() - at_ < 4) throw Invalid();
    char const* const first = text_.data() + at_;
    auto const read = std::from_chars(first, first + 4, code, 16);
    if (read.ptr != first + 4 || *first == '-') throw Invalid();
    at_ += 4;
    return code;
  }

  void read_digits() {
    if (peek() < '0' || peek() > '9') throw Invalid();
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
  }

  void read_number(Json& value) {
    std::size_t const begin = at_;
    if (peek() == '-') ++at_;
    if (peek() == '0') {
      ++at_;
    } else {
      read_digits();
    }
    bool is_whole = true;
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      read_digits();
      is_whole = false;
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      read_digits();
      is_whole = false;
    }
    std::string const digits(text_.substr(begin, at_ - begin));
    char const* const last = digits.data() + digits.size();
    if (is_whole && std::from_chars(digits.data(), last, value.whole).ec == std::errc()) {
      value.kind = Json::Kind::whole;
      value.real = static_cast<double>(value.whole);
      return;
    }
    value.kind = Json::Kind::real;
    if (std::from_chars(digits.data(), last, value.real).ec == std::errc()) return;
    if (!is_tiny(digits)) throw Invalid();
    value.real = digits[0] == '-' ? -0.0 : 0.0;
  }

  std::string_view const text_;
  std::size_t at_ = 0;
};

}  // namespace

std::optional<Json> Json::parse(std::string_view text) {
  try {
    return Parser(text).whole_text();
  } catch (Invalid const&) {
    return std::nullopt;
  }
}

std::string Json::shown() const {
  switch (kind) {
    case Kind::null:
      return "null";
    case Kind::boolean:
      return boolean ? "true" : "false";
    case Kind::whole:
      return std::to_string(whole);
    case Kind::real:
      return tide::shown(real);
    case Kind::text:
      return json_text(text);
    default:
      return kind == Kind::list ? "a list" : "an object";
  }
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    std::size_t const size = character_size(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

std::string json_text(std::string const& text) {
  std::string json = "\"";
  auto const put = [&](std::uint32_t unit) {
    char hex[8];
    std::snprintf(hex, sizeof hex, "\\u%04x", unit & 0xFFFF);
    json += hex;
  };
  for (std::size_t at = 0; at < text.size();) {
    std::size_t const size = std::max<std::size_t>(character_size(std::string_view(text).substr(at)), 1);
    std::uint32_t code = static_cast<unsigned char>(text[at]) & (size == 1 ? 0x7F : 0xFF >> (size + 1));
    for (std::size_t i = 1; i < size; ++i) code = code << 6 | (static_cast<unsigned char>(text[at + i]) & 0x3F);
    at += size;
    constexpr std::string_view special = "\"\\\b\f\n\r\t", letters = "\"\\bfnrt";
    std::size_t const index = code < 0x80 ? special.find(static_cast<char>(code)) : std::string_view::npos;
    if (index != std::string_view::npos) {
      json += std::string("\\") + letters[index];
    } else if (code >= 0x10000) {
      put(0xD800 + ((code - 0x10000) >> 10));
      put(0xDC00 + ((code - 0x10000) & 0x3FF));
    } else if (code < 0x20 || code > 0x7E) {
      put(code);
    } else {
      json += static_cast<char>(code);
    }
  }
  return json + "\"";
}

}  // namespace tide
