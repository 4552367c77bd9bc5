// All nodes that there are.
#pragma once

#include <memory>
#include <string>

#include "half_matmul.h"
#include "node.h"
#include "quantized_matmul.h"

namespace tide_ops {

std::unique_ptr<Node> half_matmul_node(HalfFormat format, bool gated);
std::unique_ptr<Node> integer_matmul_node(IntegerFormat format, bool gated);  // of int4 or int8
// Each row times the weights of the experts that its token chose.
std::unique_ptr<Node> half_expert_matmul_node(HalfFormat format);
std::unique_ptr<Node> integer_expert_matmul_node(IntegerFormat format);
std::unique_ptr<Node> attention_node(bool int8, Attributes const& attributes);
// RMSNormalization or LayerNormalization; `skip`: ONNX Runtime's, which adds first.
std::unique_ptr<Node> norm_node(bool layer, bool skip, Attributes const& attributes);
// Sigmoid, Exp, Softplus, Gelu, Clip, Add, Mul, ReduceSum, Reshape, Split or Slice; null for others.
std::unique_ptr<Node> elementwise_node(std::string const& name, Attributes const& attributes);
std::unique_ptr<Node> causal_conv_node(Attributes const& attributes);
std::unique_ptr<Node> recurrence_node();
std::unique_ptr<Node> gate_node();
std::unique_ptr<Node> lora_node(Attributes const& attributes);
// Nodes that share their threads: TideLayers. Throws std::invalid_argument if it cannot read `text`.
std::unique_ptr<Node> layers_node(std::string const& text);

// By the name of its operator; null if there is none.
std::unique_ptr<Node> node_of(std::string const& name, Attributes const& attributes);

}  // namespace tide_ops
