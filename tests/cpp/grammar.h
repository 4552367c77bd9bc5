// A grammar of llguidance as a `LogitsProcessor`, by its C API: what docs/guide/cpp.md shows.
#pragma once

#include <string>

#include "tide/runtime.h"

// Allows the tokens after `prompt` tokens that `regex` does, then the model's first end-of-sequence token. The library
// is that of TIDE_TOKENIZERS, which has llguidance's C API too.
tide::LogitsProcessor regex_of(std::string const& regex, std::string const& bundle, std::int64_t end,
                               std::size_t prompt);
