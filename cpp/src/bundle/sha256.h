// Computes SHA-256 (FIPS 180-4), so that a bundle's files are checked without a cryptography library.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace tide {

// The lower-case hex digest of what `read` returns. It fills its buffer and returns the number of bytes; fewer than the
// buffer's size at the end.
std::string sha256(std::function<std::size_t(char* to, std::size_t size)> const& read);

// Of a text.
std::string sha256_of(std::string const& text);

}  // namespace tide
