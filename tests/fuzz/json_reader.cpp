// Writes what the runtime's reader of JSON makes of a text, for targets.py.
#include <cstddef>
#include <cstdio>
#include <string>

#include "bundle/json.h"

namespace {

void write(tide::Json const& value, std::string& out) {
  using Kind = tide::Json::Kind;
  if (value.is(Kind::list)) {
    out += "[";
    for (std::size_t i = 0; i < value.list.size(); ++i) {
      if (i > 0) out += ",";
      write(value.list[i], out);
    }
    out += "]";
  } else if (value.is(Kind::object)) {
    char const* separator = "{";
    for (auto const& [name, entry] : value.object) {
      out += separator + tide::json_text(name) + ":";
      write(entry, out);
      separator = ",";
    }
    out += value.object.empty() ? "{}" : "}";
  } else if (value.is(Kind::real)) {
    char text[40];
    std::snprintf(text, sizeof text, "%.17e", value.real);  // with an exponent, as Python reads a float
    out += text;
  } else {
    out += value.shown();
  }
}

}  // namespace

// Returns JSON in ASCII, valid until the next call; NULL: the text is refused.
extern "C" __attribute__((visibility("default"))) char const* tide_fuzz_json(char const* text, std::size_t size) {
  static std::string out;
  auto const value = tide::Json::parse(std::string_view(text, size));
  if (!value) return nullptr;
  out.clear();
  write(*value, out);
  return out.c_str();
}
