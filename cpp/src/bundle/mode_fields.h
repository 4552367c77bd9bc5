// Parses and checks the fields `drafting` and `auto` of tide.json.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "bundle/fields.h"
#include "tide/manifest.h"

namespace tide {

// Throws BundleError with a field and the rule that it must keep, unless it does.
using Require = std::function<void(bool, std::string const&, std::string const&)>;

// None where the field is null or missing. Throw BundleError, naming a field that is missing, unknown or of another type.
std::optional<Drafting> drafting_of(Field const& field);
std::optional<AutoMode> auto_mode_of(Field const& manifest);

void check_modes(Manifest const& manifest, Require const& require);

}  // namespace tide
