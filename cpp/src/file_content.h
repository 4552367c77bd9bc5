// Reads small files that a caller names.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>

namespace tide {

// The content of a file; none: it is missing, no file (reading a folder throws, a pipe blocks), or unreadable.
inline std::optional<std::string> file_content(std::filesystem::path const& path) {
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown)) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return file ? std::optional(std::move(content)) : std::nullopt;
}

}  // namespace tide
