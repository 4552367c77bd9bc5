// Converts the numbers of hidden states between a network's type and the host's float32.
#pragma once

#include <cstddef>
#include <string>

namespace tide {

// dtype: "float32", "float16" or "bfloat16".
void widen(std::string const& dtype, std::byte const* source, std::size_t count, float* target);

// Rounds to the nearest, ties to even; what is too large becomes infinite.
void narrow(std::string const& dtype, float const* source, std::size_t count, std::byte* target);

}  // namespace tide
