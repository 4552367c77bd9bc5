// Registers the operators of cpp/ops, which are part of this library.
#pragma once

#include "onnxruntime/api.h"

namespace tide {

// Adds them to the options of a session.
void register_operators(Ort::SessionOptions& options);

}  // namespace tide
