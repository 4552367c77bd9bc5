// Parses the fields `networks` and `engines` of tide.json.
#pragma once

#include <optional>

#include "bundle/fields.h"
#include "tide/manifest.h"

namespace tide {

// None where the field is null. Throw BundleError, naming a field that is missing, unknown or of another type.
std::optional<NetworksInfo> networks_of(Field const& field);
std::optional<EnginesInfo> engines_of(Field const& field);

}  // namespace tide
