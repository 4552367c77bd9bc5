"""Names of the operators that the project defines.

They are symbols in the trace, model-local functions, and operators of `cpp/ops`.
"""

# TensorRT dispatches on the bare op type whatever its domain, so no name may equal an ONNX op's.
DOMAIN = "tide"
OP_MARKER = "TideMarker"  # identity marker in the trace, attribute `layer` = layers run so far
OP_ATTENTION = "TideAttention"  # symbolic causal attention in the trace, attribute `layer`
OP_MASKED_ATTENTION = "TideMaskedAttention"  # symbolic attention under the model's mask, replaced after the trace
# Layers with a recurrent state, in the trace, as model-local functions and in cpp/ops; attributes `layer`, `number`.
OP_CAUSAL_CONV, OP_RECURRENCE = STATE_OPERATORS = ("TideCausalConv", "TideRecurrence")
OP_EXPERT_MATMUL = "TideExpertMatMul"  # symbolic: rows [T, c, K] times the weights of each token's k experts
OP_QUANTIZED_MATMUL = "TideQuantizedMatMul"  # symbolic: states times a quantized matrix, attribute `weights`
OP_QUANTIZED_GATHER = "TideQuantizedGather"  # symbolic: rows of a quantized matrix, attribute `weights`
# x [.., K] times [N, K], by the type of these weights; model-local functions and operators of cpp/ops.
OP_HALF_MATMUL = {"bf16": "TideBf16MatMul", "fp16": "TideFp16MatMul"}
# MatMulNBits at accuracy level 4, by bits; model-local functions and operators of cpp/ops.
OP_INTEGER_MATMUL = {4: "TideInt4MatMul", 8: "TideInt8MatMul"}
OP_OUTLIER_MATMUL = "TideInt4OutlierMatMul"  # of x and, again, those of its inputs that a fourth input numbers
INTEGER_MATMULS = (*OP_INTEGER_MATMUL.values(), OP_OUTLIER_MATMUL)
# The products by an MLP's gate and up projections, one matrix after the other: SiLU(gate) * up; likewise both.
OP_GATED_MATMUL = {name: name.replace("Tide", "TideGated") for name in (*OP_HALF_MATMUL.values(), *INTEGER_MATMULS)}
# The products by the experts that each token chose, by the type or the bits of their weights; likewise both.
OP_HALF_EXPERTS = {name: name.replace("MatMul", "ExpertMatMul") for name in OP_HALF_MATMUL.values()}
OP_INTEGER_EXPERTS = {name: name.replace("MatMul", "ExpertMatMul") for name in OP_INTEGER_MATMUL.values()}
OP_MXFP4_EXPERTS = "TideMxfp4ExpertMatMul"
INTEGER_EXPERTS = (*OP_INTEGER_EXPERTS.values(), OP_MXFP4_EXPERTS)
# Attention to K/V pages, by their type; likewise both.
OP_PAGED_ATTENTION = {"float32": "TidePagedAttention", "int8": "TideInt8PagedAttention"}
OP_GATE = "TideGate"  # [.., 2 W] -> SiLU of the first half times the second; likewise both
# y + x down up by the adapter of each sequence; in the trace too, there with attributes `target`, `layer`, `rank`.
OP_LORA = "TideLora"
# A run of layers (the nodes above, norms and additions), with integer matrices or without; likewise both.
OP_INTEGER_LAYERS, OP_LAYERS = "TideIntegerLayers", "TideLayers"
# A checkpoint: the last token's (lens +) final norm + router, by whether it has a lens; likewise both.
OP_CANDIDATE, OP_LENS_CANDIDATE = "TideCandidate", "TideLensCandidate"
# Every operator of cpp/ops.
OPERATORS = (
    *(*OP_HALF_MATMUL.values(), *INTEGER_MATMULS, *OP_GATED_MATMUL.values()),
    *(*OP_HALF_EXPERTS.values(), *INTEGER_EXPERTS),
    *(*OP_PAGED_ATTENTION.values(), *STATE_OPERATORS, OP_GATE, OP_LORA),
    *(OP_INTEGER_LAYERS, OP_LAYERS, OP_CANDIDATE, OP_LENS_CANDIDATE),
)
OP_EXIT = "TideExit"  # lens + norm + router + exit scatter; model-local function and TensorRT plugin
WEIGHTS_METADATA = "tide.weights"  # of a node: the parameters that hold its quantized rows, one a line
PLUGIN_NAMESPACE = "tide"
PLUGIN_VERSION = "1"
