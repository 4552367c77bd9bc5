// Small pieces of sentences, written as the Python runtime writes them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tide {

std::string quoted(std::filesystem::path const& path);

// The shortest text that reads back as the same number, as Python's repr: 1.0, 0.85, nan.
std::string shown(double value);

template <typename T>
std::string joined(std::vector<T> const& values, char const* between) {
  std::string text;
  for (auto const& value : values) text += (text.empty() ? "" : between) + std::to_string(value);
  return text;
}

// What an exception says, without the lines that may follow the first.
std::string first_line(std::exception const& error);

}  // namespace tide
