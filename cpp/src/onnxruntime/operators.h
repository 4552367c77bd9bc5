// Registers the operators of domain "tide", which are part of this library.
#pragma once

#include "onnxruntime/api.h"

namespace tide {

// Adds those of cpp/ops to the options of a session on the CPU.
void register_operators(Ort::SessionOptions& options);

// Adds TideExit to those of a session on a GPU.
void register_cuda_operators(Ort::SessionOptions& options);

}  // namespace tide
