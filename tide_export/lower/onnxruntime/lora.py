"""Gives the nodes of low-rank adapters the function that defines them.

MLPs that they change get a function of their own.

`tide::TideLora` and `tide::TideGate` are operators of `cpp/ops`, and model-local functions, which an ONNX Runtime
without them inlines. Where a gate or up projection may be changed by an adapter, both are no longer one matmul with its
gate (see `gated_matmuls`); SiLU(gate) * up is then one TideGate.
"""

import onnx.parser
import onnx_ir as ir

from tide_export.graph.builder import OPSET
from tide_export.graph.rewriting import nodes_of, required
from tide_export.names.operators import DOMAIN, OP_LORA


class LoraFunctionsPass(ir.passes.InPlacePass):
    """After all passes that change matmuls."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes, opset = nodes_of(model.graph, OP_LORA, DOMAIN), required(model.graph.opset_imports[""])
        for node in nodes:
            function = lora_function(len(node.inputs) == 5, opset)
            node.overload = function.overload
            model.functions.setdefault(function.identifier(), function)
        return ir.passes.PassResult(model, modified=bool(nodes))


def lora_function(several: bool, opset: int = OPSET) -> ir.Function:
    """Defines `TideLora`: y [.., W], x [.., K], weights [A, T], adapters [R] -> y.

    Columns `column` to `column + width` of y change by x down up. A row of `weights` holds down [K, rank] at `offset`,
    then up [rank, width].

    Args:
        several: there are several sequences, and a further input with where each one's tokens start, [R + 1].
    """
    of_token = _OF_SEVERAL if several else "of_token = Expand (adapters, rows)"
    text = f"""<opset_import: ["" : {opset}], domain: "{DOMAIN}">
        {OP_LORA} <offset, rank, column, width> (y, x, weights, adapters{", starts" if several else ""}) => (changed) {{
            {_BEFORE} {of_token} {_AFTER}
        }}"""
    function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
    function.overload = "starts" if several else ""
    return function


_BEFORE = """
    zero = Constant <value_ints = [0]> ()  one = Constant <value_ints = [1]> ()  rest = Constant <value_ints = [-1]> ()
    offset_1 = Constant <value_int: int = @offset> ()  rank_1 = Constant <value_int: int = @rank> ()
    column_1 = Constant <value_int: int = @column> ()  width_1 = Constant <value_int: int = @width> ()
    begin = Reshape (offset_1, one)  r = Reshape (rank_1, one)
    before = Reshape (column_1, one)  n = Reshape (width_1, one)
    k = Shape <start = -1> (x)  w = Shape <start = -1> (y)
    row_shape = Concat <axis = 0> (rest, k)  x_rows = Reshape (x, row_shape)
    rows = Shape <start = 0, end = 1> (x_rows)
"""
# The sequence of token t is the last one that starts at t or before it.
_OF_SEVERAL = """
    zero_1 = Constant <value_int = 0> ()  one_1 = Constant <value_int = 1> ()
    rows_1 = Squeeze (rows)  tokens = Range (zero_1, rows_1, one_1)  column_of_tokens = Unsqueeze (tokens, one)
    begun = LessOrEqual (starts, column_of_tokens)  counts = Cast <to = 7> (begun)
    started = ReduceSum <keepdims = 0> (counts, one)  sequences = Sub (started, one)
    of_token = Gather (adapters, sequences)
"""
_AFTER = """
    own = Gather (weights, of_token)
    k_r = Mul (k, r)  r_n = Mul (r, n)  middle = Add (begin, k_r)  end = Add (middle, r_n)
    down_flat = Slice (own, begin, middle, one)  down_shape = Concat <axis = 0> (rest, k, r)
    down = Reshape (down_flat, down_shape)
    up_flat = Slice (own, middle, end, one)  up_shape = Concat <axis = 0> (rest, r, n)
    up = Reshape (up_flat, up_shape)
    x_cube = Unsqueeze (x_rows, one)  low = MatMul (x_cube, down)  delta_cube = MatMul (low, up)
    delta = Squeeze (delta_cube, one)
    used = Add (before, n)  after = Sub (w, used)  pads = Concat <axis = 0> (zero, before, zero, after)
    padded = Pad (delta, pads)  shape = Shape (y)  delta_of_y = Reshape (padded, shape)
    changed = Add (y, delta_of_y)
"""
