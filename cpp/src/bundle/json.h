// Parses JSON strictly: UTF-8 without a byte order mark, finite numbers, at most kMaxDepth levels, no name
// twice in an object, nothing after the value.
// Integers of more than 64 bits become floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tide {

class Json {
 public:
  enum class Kind { null, boolean, whole, real, text, list, object };

  // The value of a text; none: it is no such text.
  static std::optional<Json> parse(std::string_view text);

  Kind kind = Kind::null;
  bool boolean = false;
  std::int64_t whole = 0;
  double real = 0;
  std::string text;
  std::vector<Json> list;
  std::map<std::string, Json> object;
  std::size_t begin = 0, end = 0;  // where it is in the text that was parsed

  bool is(Kind wanted) const { return kind == wanted; }

  // The value as JSON in ASCII, of a list or an object "a list" or "an object": for messages.
  std::string shown() const;
};

// Whether a text is valid UTF-8.
bool is_utf8(std::string_view text);

// A text as JSON in ASCII, with its quotes.
std::string json_text(std::string const& text);

}  // namespace tide
