// Opens a bundle's tokenizer.json with a library that has the C binding of Hugging Face's tokenizers.
#pragma once

#include <filesystem>
#include <optional>

#include "bundle/store.h"
#include "tide/tokenizer.h"

namespace tide {

constexpr char const* kTokenizerFile = "tokenizer.json";

// library: as in `Engine::tokenizer`. Throws BundleError: the bundle holds no tokenizer.json, or it is damaged.
// ProviderError: there is no such library.
Tokenizer open_tokenizer(Bundle const& bundle, std::optional<std::filesystem::path> const& library);

}  // namespace tide
