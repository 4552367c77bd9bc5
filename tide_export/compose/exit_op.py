"""Defines the tail of a segment as a `tide::TideExit` function: last token, lens, final norm, router, exit scatter.

A segment network calls it once. As with any function, ONNX Runtime inlines the body; TensorRT takes the plugin of that
name, if one is registered, because the calling node carries `plugin_namespace` and `plugin_version`.
"""

import onnx_ir as ir

from tide_export.compose.router_op import add_score, named
from tide_export.names import DOMAIN, DUMP_ROW, EXIT_ROW, OP_EXIT, PLUGIN_NAMESPACE, PLUGIN_VERSION
from tide_export.trace.rewriting import FLOAT, INT32

THRESHOLDS, EXIT_STATES, WEIGHTS = 2, 3, 4  # inputs
SCORE = 1  # an output
NORMS = {"RMSNormalization": "rms", "LayerNormalization": "layer"}


def exit_function(call: ir.Node, opset: int) -> ir.Function:
    """The function that `call` calls.

    TideExit(states T [B, S, D'], last_tokens [B], thresholds [B], exit_states T [B, 1, P, D'], down [D', R], up [R, 1],
    bias [1], ...) -> new_exit_states T [B, 1, P, D'], score [B], exits [B]. Of each slot's last token, the state that
    the head would read is written to the slot's `EXIT_ROW` where its score is above the slot's threshold (never for
    NaN), and else to `DUMP_ROW`; all other rows stay. The output is the memory of the input. Scores, thresholds and the
    router are float32, exits int32, for plugins have no bool.

    By the attributes more inputs follow: with `shortlist` 1, shortlist [D', N] and confidence [2, R]; with `lens` 1,
    lens_down T [D', r], lens_up T [r, D'] and lens_bias T [D']; with `norm` "rms", scale T [D'], with "layer" scale
    and, if there is one, shift. With "none", the states have been normed already.
    """
    attributes = {name: attribute.value for name, attribute in call.attributes.items()}
    names = ["states", "last_tokens", "thresholds", "exit_states", "down_weight", "up_weight", "bias"]
    names += ["shortlist_weight", "confidence_weight"] if attributes["shortlist"] else []
    names += ["lens_down", "lens_up", "lens_bias"] if attributes["lens"] else []
    names += ["norm_scale", "norm_shift"][: len(call.inputs) - len(names)]
    inputs = {name: ir.Value(name=name) for name in names}
    tape = ir.tape.Tape()

    def numbers(*values: int) -> ir.Value:
        return tape.op("Constant", [], {"value_ints": list(values)})

    index = tape.op("Unsqueeze", [inputs["last_tokens"], numbers(1)])
    state = tape.op("GatherND", [inputs["states"], index], {"batch_dims": 1})
    if attributes["lens"]:
        low = tape.op("MatMul", [state, inputs["lens_down"]])
        change = tape.op("Add", [tape.op("MatMul", [low, inputs["lens_up"]]), inputs["lens_bias"]])
        state = tape.op("Add", [state, change])
    for op_type, norm in NORMS.items():
        if attributes["norm"] == norm:
            weights = [inputs[name] for name in names if name.startswith("norm_")]
            state = tape.op(op_type, [state, *weights], {"axis": -1, "epsilon": attributes["epsilon"]})
    wide = tape.op("Cast", [state], {"to": FLOAT.value})
    shortlist = [inputs[name] for name in ("shortlist_weight", "confidence_weight") if name in inputs]
    score = add_score(tape, wide, [inputs[name] for name in ("down_weight", "up_weight", "bias")], shortlist)
    score = tape.op("Squeeze", [score, numbers(1)])
    exits = tape.op("Greater", [score, inputs["thresholds"]])
    row = tape.op("Where", [exits, numbers(EXIT_ROW), numbers(DUMP_ROW)])
    update = tape.op("Unsqueeze", [state, numbers(1, 2)])
    scattered = tape.op("TensorScatter", [inputs["exit_states"], update, row], {"axis": -2})
    exits = tape.op("Cast", [exits], {"to": INT32.value})
    nodes = named(tape)
    outputs = {"new_exit_states": scattered, "score": score, "exits": exits}
    for name, value in outputs.items():
        value.name = name
    body = ir.Graph(list(inputs.values()), list(outputs.values()), nodes=nodes, opset_imports={"": opset}, name=OP_EXIT)
    return ir.Function(DOMAIN, OP_EXIT, graph=body, attributes=_parameters(attributes))


def exit_attributes(norm: str, epsilon: float, lens: bool, shortlist: bool) -> dict[str, str | float | int]:
    """The attributes of a call; see `exit_function`."""
    plugin = {"plugin_namespace": PLUGIN_NAMESPACE, "plugin_version": PLUGIN_VERSION}
    return {**plugin, "norm": norm, "epsilon": float(epsilon), "lens": int(lens), "shortlist": int(shortlist)}


def stays_float32(node: ir.Node, index: int) -> bool:
    """Whether input `index` of a call is float32 whatever T is: thresholds and the router's weights."""
    end = WEIGHTS + (5 if node.attributes["shortlist"].as_int() else 3)
    return index == THRESHOLDS or WEIGHTS <= index < end


def _parameters(attributes: dict) -> list[ir.Attr]:
    kinds = {str: ir.AttributeType.STRING, float: ir.AttributeType.FLOAT, int: ir.AttributeType.INT}
    return [ir.Attr(name, kinds[type(value)], value) for name, value in attributes.items()]
