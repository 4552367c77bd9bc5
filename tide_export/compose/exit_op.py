"""Defines the tail of a segment as a `tide::TideExit` function.

It takes the last token's hidden state, applies lens, final norm and router, and scatters the exit state.

A segment network calls it once. As with any function, ONNX Runtime inlines the body; TensorRT takes the plugin of that
name, if one is registered, because the calling node carries `plugin_namespace` and `plugin_version`.
"""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from tide_export.graph.builder import GraphBuilder, Weights
from tide_export.graph.rewriting import FLOAT, INT32
from tide_export.names.operators import PLUGIN_NAMESPACE, PLUGIN_VERSION
from tide_export.names.segment_networks import DUMP_ROW, EXIT_ROW

THRESHOLDS, EXIT_STATES, WEIGHTS = 2, 3, 4  # inputs
SCORE = 1  # an output
NORMS = {"RMSNormalization": "rms", "LayerNormalization": "layer"}


def exit_function(call: ir.Node, opset: int) -> ir.Function:
    """The function that `call` calls.

    TideExit(states T [B, S, D'], last_tokens [B], thresholds [B], exit_states T [B, 1, P, D'], down [D', R], up [R, 1],
    bias [1], ...) -> new_exit_states T [B, 1, P, D'], score [B], exits [B]. Of each slot's last token, the hidden state
    that the head would read is written to the slot's `EXIT_ROW` where its score is above the slot's threshold (never
    for NaN), and else to `DUMP_ROW`; all other rows stay. The output is the memory of the input. Scores, thresholds and
    the router are float32, exits int32, for plugins have no bool.

    By the attributes more inputs follow: with `shortlist` 1, shortlist [D', N] and confidence [2, R]; with `lens` 1,
    lens_down T [D', r], lens_up T [r, D'] and lens_bias T [D']; with `norm` "rms", scale T [D'], with "layer" scale
    and, if there is one, shift. With "none", the hidden states are normalized already.
    """
    inputs = input_values(call, ["states", "last_tokens", "thresholds", "exit_states"])
    body = GraphBuilder(call.op_type, Weights())

    def numbers(*values: int) -> ir.Value:
        return body.op("Constant", [], {"value_ints": list(values)})

    index = body.op("Unsqueeze", [inputs["last_tokens"], numbers(1)])
    hidden = body.op("GatherND", [inputs["states"], index], {"batch_dims": 1})
    hidden = add_exit_state(body, call, hidden, inputs)
    wide = body.op("Cast", [hidden], {"to": FLOAT.value})
    score = body.op("Squeeze", [add_score(body, wide, inputs), numbers(1)])
    exits = body.op("Greater", [score, inputs["thresholds"]])
    row = body.op("Where", [exits, numbers(EXIT_ROW), numbers(DUMP_ROW)])
    update = body.op("Unsqueeze", [hidden, numbers(1, 2)])
    scattered = body.op("TensorScatter", [inputs["exit_states"], update, row], {"axis": -2})
    exits = body.op("Cast", [exits], {"to": INT32.value})
    outputs = {"new_exit_states": scattered, "score": score, "exits": exits}
    return function_of(call, body, inputs, outputs, opset)


def exit_attributes(norm: str, epsilon: float, lens: bool, shortlist: bool) -> dict[str, str | float | int]:
    """The attributes of a call; see `exit_function`."""
    plugin = {"plugin_namespace": PLUGIN_NAMESPACE, "plugin_version": PLUGIN_VERSION}
    return {**plugin, "norm": norm, "epsilon": float(epsilon), "lens": int(lens), "shortlist": int(shortlist)}


def stays_float32(node: ir.Node, index: int) -> bool:
    """Whether input `index` of a call is float32 whatever T is: thresholds and the router's weights."""
    end = WEIGHTS + (5 if node.attributes["shortlist"].as_int() else 3)
    return index == THRESHOLDS or WEIGHTS <= index < end


# --- what every function of a checkpoint has ------------------------------------------------------------------------


def input_values(call: ir.Node, first: Sequence[str]) -> dict[str, ir.Value]:
    """Returns the function's inputs by name.

    They are `first`, then those of router, shortlist, lens and norm that the call has.
    """
    names = [*first, "down_weight", "up_weight", "bias"]
    names += ["shortlist_weight", "confidence_weight"] if call.attributes["shortlist"].as_int() else []
    names += ["lens_down", "lens_up", "lens_bias"] if call.attributes["lens"].as_int() else []
    names += ["norm_scale", "norm_shift"][: len(call.inputs) - len(names)]
    return {name: ir.Value(name=name) for name in names}


def add_exit_state(body: GraphBuilder, call: ir.Node, hidden: ir.Value, inputs: Mapping[str, ir.Value]) -> ir.Value:
    """Adds the lens and the norm that the call has."""
    if "lens_down" in inputs:
        low = body.op("MatMul", [hidden, inputs["lens_down"]])
        change = body.op("Add", [body.op("MatMul", [low, inputs["lens_up"]]), inputs["lens_bias"]])
        hidden = body.op("Add", [hidden, change])
    for op_type, norm in NORMS.items():
        if call.attributes["norm"].as_string() == norm:
            weights = [value for name, value in inputs.items() if name.startswith("norm_")]
            epsilon = call.attributes["epsilon"].as_float()
            hidden = body.op(op_type, [hidden, *weights], {"axis": -1, "epsilon": epsilon})
    return hidden


def add_score(body: GraphBuilder, hidden: ir.Value, inputs: Mapping[str, ir.Value]) -> ir.Value:
    """Adds the router on `hidden` [.., D']: an MLP (with the shortlist's summary, if there is one).

    Returns the scores [.., 1].
    """
    z = body.op("MatMul", [hidden, inputs["down_weight"]])
    if "shortlist_weight" in inputs:
        logits = body.op("MatMul", [hidden, inputs["shortlist_weight"]])
        two = body.op("Constant", [], {"value_ints": [2]})
        shares = body.op("LogSoftmax", [logits], {"axis": -1})
        summary, _ = body.ops("TopK", [shares, two], {"axis": -1}, types=[(None, None)] * 2)
        z = body.op("Add", [z, body.op("MatMul", [summary, inputs["confidence_weight"]])])
    z = body.op("Mul", [z, body.op("Sigmoid", [z])])
    return body.op("Sigmoid", [body.op("Add", [body.op("MatMul", [z, inputs["up_weight"]]), inputs["bias"]])])


def function_of(
    call: ir.Node, body: GraphBuilder, inputs: Mapping[str, ir.Value], outputs: Mapping[str, ir.Value], opset: int
) -> ir.Function:
    """Returns the function that `call` calls, of the nodes of `body`."""
    parameters = [ir.Attr(name, attribute.type, attribute.value) for name, attribute in call.attributes.items()]
    return body.function(call.op_type, list(inputs.values()), outputs, opset, parameters)
