// The operators of domain "tide" that run on the CPU in ONNX Runtime.
#pragma once

#include <vector>

#include "onnxruntime_abi.h"

namespace tide_ops {

// Those that are nodes (nodes.h): that need a CPU with instructions for integers, or the others.
std::vector<abi::Operator const*> node_operators(bool of_integers);

// Adds them to the options (OrtSessionOptions) of a session; an OrtStatus, or null if that went well.
abi::Status* register_operators(abi::SessionOptions* options, abi::ApiBase const* base);

}  // namespace tide_ops
