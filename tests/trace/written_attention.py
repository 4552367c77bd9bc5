"""Attention spelled out in a few lines of ONNX, as in the trace of a model that computes it itself."""

import onnx.parser
import onnx_ir as ir

TEMPLATE = """
<ir_version: 10, opset_import: ["" : 23, "tide" : 1]>
attention (int64[B,S] input_ids, int64[B,S] position_ids) => (float[B,S,2,8] out)
<float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,8,S] k_transposed, float[B,2,S,S] scores,
 float[B,2,S,S] logits, float[B,2,S,S] weights, float[B,2,S,8] context, int64[1] size, float[B,S] by_token,
 float[B,2,1,S] by_key, float[B,1,1,S] shared, float[B,2,S,S] mask,
 float nought = {{0.0}}, float least = {{-3.4e38}}, float half = {{0.5}}, float two = {{2.0}},
 float full = {{1.0}}, float low = {{-1e4}}, int64 zero = {{0}},
 int64 one = {{1}}, int64 three = {{3}}, float[2,1,1] slopes = {{0.5, 0.25}}, float[3] table = {{1.0, 2.0, 3.0}},
 bool[2,1,1] first_head = {{1, 0}}, int64[1] at_0 = {{0}}, int64[1] at_1 = {{1}},
 int64[2] one_and_0 = {{1, 0}}>
{{
  q, k, v, by_key, shared = tide.Project (input_ids)
  k_transposed = Transpose <perm = [0, 1, 3, 2]> (k)
  scores = MatMul (q, k_transposed)
  size = Shape <start = 1, end = 2> (input_ids)
  length = Squeeze (size)
  places = Range (zero, length, one)
  query = Unsqueeze (places, at_1)
  key = Unsqueeze (places, at_0)
  causal = LessOrEqual (key, query)
  distance = Sub (key, query)
  apart = Cast <to = 1> (distance)
  place = Cast <to = 1> (key)
  {chain}
  weights = Softmax <axis = -1> (logits)
  context = MatMul (weights, v)
  out = Transpose <perm = [0, 2, 1, 3]> (context)
}}
"""


def spelled_out(chain: str) -> ir.Model:
    """A model whose attention makes `logits` of `scores` [B, 2, S, S] by `chain`.

    Available: `causal` [S, S]; `place`, `apart` (float: key position, key minus query); numbers of tokens by head
    and key (`by_key`), or alike for all heads (`shared`); constants of the template.
    """
    model = ir.from_proto(onnx.parser.parse_model(TEMPLATE.format(chain=chain)))
    for node in model.graph:
        node.name = f"{node.op_type}_{node.outputs[0].name}"
    for value in model.graph.initializers.values():
        value.shape, value.type = ir.Shape(value.const_value.shape), ir.TensorType(value.const_value.dtype)
    return model
