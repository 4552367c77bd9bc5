// Parses and checks the field `model` of tide.json.
#pragma once

#include "bundle/fields.h"
#include "bundle/mode_fields.h"
#include "tide/manifest.h"

namespace tide {

// Throws BundleError, naming a field that is missing, unknown or of another type.
ModelInfo model_of(Field const& field);

void check_model(ModelInfo const& model, Require const& require);

}  // namespace tide
