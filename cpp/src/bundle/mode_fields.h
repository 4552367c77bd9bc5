// Reads thresholds and the fields `drafting` and `auto` of tide.json.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "bundle/fields.h"
#include "tide/manifest.h"

namespace tide {

// All functions throw BundleError, naming a field that is missing, of another type or out of range.

// As many numbers, each in [0, 1].
std::vector<double> shares_of(Field const& field, std::size_t count);

// A `drafting`, whose numbers nobody has checked.
Drafting drafting_in(Field const& field);

// None where the field is null or missing; `points`: the number of checkpoints.
std::optional<Drafting> drafting_of(Field const& manifest, std::size_t points);
std::optional<AutoMode> auto_mode_of(Field const& manifest, std::size_t points);

}  // namespace tide
