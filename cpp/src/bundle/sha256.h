// SHA-256 (FIPS 180-4), to check a bundle's files without linking a cryptography library.
#pragma once

#include <istream>
#include <string>

namespace tide {

// The lower-case hex digest of the rest of the stream.
std::string sha256(std::istream& stream);

}  // namespace tide
