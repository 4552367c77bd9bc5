// The operators of domain "tide" that run on the CPU in ONNX Runtime.
#pragma once

#include <string>
#include <vector>

#include "onnxruntime_abi.h"

namespace tide_ops {

// Attention to K/V in pages, float32 or int8 (attention_op.cpp).
abi::Operator attention_operator(bool int8);

// Matrices in 16 bits (half_matmul_op.cpp), and in 8 and 4 (quantized_matmul_op.cpp).
std::vector<abi::Operator> half_operators();
std::vector<abi::Operator> integer_operators();

// Adds them to the options (OrtSessionOptions) of a session; an OrtStatus, or null if that went well.
abi::Status* register_operators(abi::SessionOptions* options, abi::ApiBase const* base);

// All names, a blank after each: also of those that this CPU lacks the instructions for.
std::string operator_names();

}  // namespace tide_ops
