// Reads the fields `networks` and `engines` of tide.json.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "bundle/fields.h"
#include "tide/manifest.h"

namespace tide {

// None where the field is null. Throw BundleError, naming a field that is missing, of another type or out of range.
std::optional<NetworksInfo> networks_of(Field const& manifest, std::map<std::string, FileInfo> const& files);
std::optional<PlansInfo> plans_of(Field const& manifest);

}  // namespace tide
