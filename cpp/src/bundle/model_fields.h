// Reads the field `model` of tide.json.
#pragma once

#include "bundle/fields.h"
#include "tide/manifest.h"

namespace tide {

// Throws BundleError, naming a field that is missing, of another type or out of range.
ModelInfo model_of(Field const& field);

}  // namespace tide
