#include "results.h"

#include <cstdio>
#include <vector>

namespace {

std::string shown(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

template <typename T, typename F>
std::string list(std::vector<T> const& values, F const& entry) {
  std::string text;
  for (T const& value : values) text += (text.empty() ? "" : ", ") + entry(value);
  return "[" + text + "]";
}

std::string as_json(tide::TokenLogprobs const& one) {
  auto const pair = [](auto const& top) { return "[" + std::to_string(top.first) + ", " + shown(top.second) + "]"; };
  return "{\"logprob\": " + shown(one.logprob) + ", \"top\": " + list(one.top, pair) + "}";
}

}  // namespace

std::string fields(tide::Generation const& generation) {
  std::string const tokens = list(generation.tokens, [](std::int64_t token) { return std::to_string(token); });
  std::string text = "\"tokens\": " + tokens + ", \"finish_reason\": \"" +
                     std::string(name_of(generation.finish_reason)) + "\", \"stats\": " + generation.stats.json();
  if (generation.text) text += ", \"text\": " + json_string(*generation.text);
  if (!generation.logprobs.empty()) {
    text += ", \"logprobs\": " + list(generation.logprobs, [](auto const& one) { return as_json(one); });
  }
  return text;
}

std::string json_string(std::string const& text) {
  std::string json;
  for (char const byte : text) {
    if (byte == '"' || byte == '\\') {
      json += {'\\', byte};
    } else if (static_cast<unsigned char>(byte) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", byte);
      json += code;
    } else {
      json += byte;
    }
  }
  return '"' + json + '"';
}
