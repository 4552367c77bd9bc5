// Reads the field `drafter` of tide.json.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bundle/fields.h"
#include "tide/manifest.h"

namespace tide {

// None where the field is null or missing. Throws BundleError, naming a field that is missing, of another type or out of
// range.
std::optional<DrafterInfo> drafter_of(Field const& manifest, ModelInfo const& model);

// The first and last id of each range of a text like "0-3,7"; empty: it is none, or not ascending.
std::vector<std::pair<std::int64_t, std::int64_t>> ranges_of(std::string const& text);

}  // namespace tide
