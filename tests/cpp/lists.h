// Lists of values, and generations, as JSON.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "results.h"
#include "tide/runtime.h"

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

inline std::string as_json(tide::Generation const& generation) { return "{" + fields(generation) + "}"; }

inline std::string as_json(std::vector<tide::Generation> const& generations) {
  return list(generations.data(), generations.size(), [](tide::Generation const& one) { return as_json(one); });
}
