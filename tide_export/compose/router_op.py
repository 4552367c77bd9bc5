"""Defines the router as a `tide::TideRoute` function: MLP (with the shortlist's summary), sigmoid, threshold.

A graph for ONNX Runtime holds it once and calls it once per checkpoint; the segment networks have it inside `TideExit`.
"""

from collections.abc import Sequence

import onnx_ir as ir

from tide_export.names import DOMAIN, OP_ROUTE, PLUGIN_NAMESPACE, PLUGIN_VERSION
from tide_export.routers.router import RouterArrays
from tide_export.trace.tracer import OPSET


def route_function(router: RouterArrays, opset: int = OPSET) -> ir.Function:
    """TideRoute(states [B, 1, D'], threshold [1], down [D', R], up [R, 1], bias [1], ...) -> score, exit [B, 1, 1].

    The step graph calls it on matrices instead, states [1, D'] -> score, exit [1, 1]: ONNX Runtime then fuses biases
    and sigmoids with the matmuls. With a shortlist of N tokens two more inputs follow, shortlist [D', N] and confidence
    [2, R]. Score is float32 in [0, 1], exit is bool, true where score > threshold (never for NaN).

    Args:
        router: any of the model's routers; all have one form.
        opset: of the model that calls it.
    """
    names = ["normed_states", "threshold", "down_weight", "up_weight", "bias"]
    if router.confidence is not None:
        names += ["shortlist_weight", "confidence_weight"]
    parameters = [ir.Value(name=name) for name in names]
    states, threshold, down, up, bias = parameters[:5]
    tape = ir.tape.Tape()
    score = add_score(tape, states, [down, up, bias], parameters[5:])
    exits = tape.op("Greater", [score, threshold])
    nodes = named(tape)
    score.name, exits.name = "score", "exit"
    body = ir.Graph(parameters, [score, exits], nodes=nodes, opset_imports={"": opset}, name=OP_ROUTE)
    attributes = [
        ir.AttrFloat32(name, value) if isinstance(value, float) else ir.AttrString(name, value)
        for name, value in route_attributes().items()
    ]
    return ir.Function(DOMAIN, OP_ROUTE, graph=body, attributes=attributes)


def add_score(
    tape: ir.tape.Tape, states: ir.Value, router: Sequence[ir.Value], shortlist: Sequence[ir.Value]
) -> ir.Value:
    """Adds the router on states [.., D'] to `tape`: its score [.., 1]. `router`: down, up and bias; `shortlist`: its
    weights and the confidence's, or none."""
    down, up, bias = router
    z = tape.op("MatMul", [states, down])
    if shortlist:
        logits = tape.op("MatMul", [states, shortlist[0]])
        two = tape.op("Constant", [], {"value_ints": [2]})
        summary, _ = tape.op_multi_out(
            "TopK", [tape.op("LogSoftmax", [logits], {"axis": -1}), two], {"axis": -1}, num_outputs=2
        )
        z = tape.op("Add", [z, tape.op("MatMul", [summary, shortlist[1]])])
    z = tape.op("Mul", [z, tape.op("Sigmoid", [z])])
    return tape.op("Sigmoid", [tape.op("Add", [tape.op("MatMul", [z, up]), bias])])


def named(tape: ir.tape.Tape) -> list[ir.Node]:
    """The nodes of `tape`, a function's body: with names, and without types, because any caller's fit."""
    nodes = list(tape.nodes)
    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
        for index, value in enumerate(node.outputs):
            value.name, value.type, value.shape = f"{node.name}_out_{index}", None, None
    return nodes


def route_attributes() -> dict[str, str | float]:
    """What the plugin reads beside its inputs."""
    return {"plugin_namespace": PLUGIN_NAMESPACE, "plugin_version": PLUGIN_VERSION, "norm": "none", "epsilon": 0.0}
