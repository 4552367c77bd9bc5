// Lists of values as JSON.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

template <typename T, typename F>
std::string list(T const* values, std::size_t count, F const& shown) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + shown(values[i]);
  return "[" + text + "]";
}

inline std::string list(std::vector<std::int64_t> const& values) {
  return list(values.data(), values.size(), [](std::int64_t value) { return std::to_string(value); });
}

inline std::string list(float const* values, std::size_t count) {
  return list(values, count, [](float value) {
    if (value != value) return std::string("NaN");
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));
    return std::string(text);
  });
}
