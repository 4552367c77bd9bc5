"""Defines the tail of a segment as a `tide::TideExit` function: last token, lens, final norm, router, exit scatter.

A segment network calls it once. As with any function, ONNX Runtime inlines the body; TensorRT takes the plugin of that
name, if one is registered, because the calling node carries `plugin_namespace` and `plugin_version`.
"""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from tide_export.compose.router_op import add_score, named
from tide_export.names import DOMAIN, DUMP_ROW, EXIT_ROW, PLUGIN_NAMESPACE, PLUGIN_VERSION
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
    inputs = input_values(call, ["states", "last_tokens", "thresholds", "exit_states"])
    tape = ir.tape.Tape()

    def numbers(*values: int) -> ir.Value:
        return tape.op("Constant", [], {"value_ints": list(values)})

    index = tape.op("Unsqueeze", [inputs["last_tokens"], numbers(1)])
    state = tape.op("GatherND", [inputs["states"], index], {"batch_dims": 1})
    state = add_exit_state(tape, call, state, inputs)
    wide = tape.op("Cast", [state], {"to": FLOAT.value})
    score = tape.op("Squeeze", [add_score_of(tape, wide, inputs), numbers(1)])
    exits = tape.op("Greater", [score, inputs["thresholds"]])
    row = tape.op("Where", [exits, numbers(EXIT_ROW), numbers(DUMP_ROW)])
    update = tape.op("Unsqueeze", [state, numbers(1, 2)])
    scattered = tape.op("TensorScatter", [inputs["exit_states"], update, row], {"axis": -2})
    exits = tape.op("Cast", [exits], {"to": INT32.value})
    outputs = {"new_exit_states": scattered, "score": score, "exits": exits}
    return function_of(call, tape, inputs, outputs, opset)


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
    """The function's inputs by name: `first`, then those of router, shortlist, lens and norm that the call has."""
    names = [*first, "down_weight", "up_weight", "bias"]
    names += ["shortlist_weight", "confidence_weight"] if call.attributes["shortlist"].as_int() else []
    names += ["lens_down", "lens_up", "lens_bias"] if call.attributes["lens"].as_int() else []
    names += ["norm_scale", "norm_shift"][: len(call.inputs) - len(names)]
    return {name: ir.Value(name=name) for name in names}


def add_exit_state(tape: ir.tape.Tape, call: ir.Node, state: ir.Value, inputs: Mapping[str, ir.Value]) -> ir.Value:
    """Adds the lens and the norm that the call has."""
    if "lens_down" in inputs:
        low = tape.op("MatMul", [state, inputs["lens_down"]])
        change = tape.op("Add", [tape.op("MatMul", [low, inputs["lens_up"]]), inputs["lens_bias"]])
        state = tape.op("Add", [state, change])
    for op_type, norm in NORMS.items():
        if call.attributes["norm"].as_string() == norm:
            weights = [value for name, value in inputs.items() if name.startswith("norm_")]
            epsilon = call.attributes["epsilon"].as_float()
            state = tape.op(op_type, [state, *weights], {"axis": -1, "epsilon": epsilon})
    return state


def add_score_of(tape: ir.tape.Tape, state: ir.Value, inputs: Mapping[str, ir.Value]) -> ir.Value:
    """Adds the router that the call has."""
    shortlist = [inputs[name] for name in ("shortlist_weight", "confidence_weight") if name in inputs]
    return add_score(tape, state, [inputs[name] for name in ("down_weight", "up_weight", "bias")], shortlist)


def function_of(
    call: ir.Node, tape: ir.tape.Tape, inputs: Mapping[str, ir.Value], outputs: Mapping[str, ir.Value], opset: int
) -> ir.Function:
    """The function that `call` calls, of the nodes on `tape`."""
    nodes = named(tape)
    for name, value in outputs.items():
        value.name = name
    values = list(inputs.values()), list(outputs.values())
    body = ir.Graph(*values, nodes=nodes, opset_imports={"": opset}, name=call.op_type)
    parameters = [ir.Attr(name, attribute.type, attribute.value) for name, attribute in call.attributes.items()]
    return ir.Function(DOMAIN, call.op_type, graph=body, attributes=parameters)
