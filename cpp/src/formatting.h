// Formats values in messages as Python does.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tide {

// The path in single quotes.
std::string quoted(std::filesystem::path const& path);

// The shortest text that reads back as the same number, which is Python's repr: 1.0, 0.85, 1e+16, nan.
std::string shown(double value);

// The values with a separator between them.
template <typename T>
std::string joined(std::vector<T> const& values, char const* separator) {
  std::string text;
  for (auto const& value : values) text += (text.empty() ? "" : separator) + std::to_string(value);
  return text;
}

// The first line of an exception's message.
std::string first_line(std::exception const& error);

}  // namespace tide
