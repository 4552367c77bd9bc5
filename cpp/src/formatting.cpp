#include "formatting.h"

#include <array>
#include <charconv>
#include <cmath>

namespace tide {

std::string quoted(std::filesystem::path const& path) { return "'" + path.string() + "'"; }

std::string shown(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  auto const written = [value](std::chars_format format) {
    std::array<char, 32> digits{};
    return std::string(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value, format).ptr);
  };
  std::string const scientific = written(std::chars_format::scientific);
  int const exponent = std::stoi(scientific.substr(scientific.find('e') + 1));
  if (exponent < -4 || exponent >= 16) return scientific;
  std::string const text = written(std::chars_format::fixed);
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

std::string first_line(std::exception const& error) {
  std::string const text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace tide
