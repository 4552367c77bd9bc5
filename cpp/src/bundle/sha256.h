// SHA-256 (FIPS 180-4) of a file, for checking a bundle against its manifest: the one hash there is need of, so that a
// service need not link a library of cryptography for it.
#pragma once

#include <istream>
#include <string>

namespace tide {

// Lower-case hex of everything that is left in the stream.
std::string sha256(std::istream& stream);

}  // namespace tide
