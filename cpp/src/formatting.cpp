#include "formatting.h"

#include <array>
#include <charconv>
#include <cmath>

namespace tide {

std::string quoted(std::filesystem::path const& path) { return "'" + path.string() + "'"; }

std::string shown(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 32> digits{};
  auto const end = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  std::string const text(digits.data(), end.ptr);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

std::string first_line(std::exception const& error) {
  std::string const text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace tide
