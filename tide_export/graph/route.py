"""The router as a `tide::TideRoute` function: final norm, MLP (with the shortlist's say), sigmoid, threshold.

Written by `compose` once per model and called once per checkpoint. One definition serves two back ends: ONNX Runtime
inlines the function's body of standard ops; TensorRT, where a plugin of that name is registered, takes the plugin,
because the calling node carries `plugin_namespace` and `plugin_version`.
"""

import onnx_ir as ir

from tide_export.graph.cut import Pieces, static_dim
from tide_export.names import DOMAIN, OP_ROUTE, PLUGIN_NAMESPACE, PLUGIN_VERSION
from tide_export.routers import RouterArrays

_NORMS = {"RMSNormalization": "rms", "LayerNormalization": "layer"}


def route_function(pieces: Pieces, router: RouterArrays) -> ir.Function:
    """TideRoute(hidden [B, 1, D], threshold [1], down, up [R, 1], bias [1], confidence, *norm weights) -> score, exit.

    `down` is [D', R] and `confidence` left out for routers of TIDE's form; with a shortlist of N tokens they are
    [D', R + N] and [3, R]. The body starts with a copy of the model's own tail, so a router sees exactly what the head
    would; score is float32 [B, 1, 1] in [0, 1], exit is bool, true where score > threshold (never for NaN).

    Args:
        router: any of the model's routers; all are of one form.
    """
    tail = pieces.tail.clone()
    (normed,) = tail.outputs
    names = ["hidden_states", "threshold", "down_weight", "up_weight", "bias"]
    if router.confidence is not None:
        names.append("confidence_weight")
    parameters = [ir.Value(name=name) for name in names]
    hidden, threshold, down, up, bias = parameters[:5]
    tail.inputs[0].replace_all_uses_with(hidden)
    weights = []
    for index, initializer in enumerate(list(tail.initializers.values())):
        parameter = ir.Value(name=f"norm_weight_{index}")
        initializer.replace_all_uses_with(parameter)
        weights.append(parameter)
    tail.outputs.clear()
    nodes = list(tail)
    tail.remove(nodes)
    tape = ir.tape.Tape()
    z = tape.op("MatMul", [normed, down])
    if router.confidence is not None:
        z = _with_confidence(tape, z, router, parameters[5])
    z = tape.op("Mul", [z, tape.op("Sigmoid", [z])])
    score = tape.op("Sigmoid", [tape.op("Add", [tape.op("MatMul", [z, up]), bias])])
    leaves = tape.op("Greater", [score, threshold])
    nodes += tape.nodes
    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
        for index, value in enumerate(node.outputs):
            value.name, value.type, value.shape = f"{node.name}_out_{index}", None, None
    score.name, leaves.name = "score", "exit"
    body = ir.Graph(
        [*parameters, *weights],
        [score, leaves],
        nodes=nodes,
        opset_imports=dict(pieces.tail.opset_imports),
        name=OP_ROUTE,
    )
    return ir.Function(DOMAIN, OP_ROUTE, graph=body, attributes=_declared(route_attributes(pieces)))


def _with_confidence(tape: ir.tape.Tape, packed: ir.Value, router: RouterArrays, weight: ir.Value) -> ir.Value:
    """The hidden layer [..., R] out of the packed product [..., R + N], the shortlist's part summed up and added."""

    def constant(values: list[int]) -> ir.Value:
        return tape.op("Constant", [], {"value_ints": values})

    shortlist = router.down.shape[1] - router.width
    hidden, logits = tape.op_multi_out(
        "Split", [packed, constant([router.width, shortlist])], {"axis": -1}, num_outputs=2
    )
    largest, _ = tape.op_multi_out("TopK", [logits, constant([2])], {"axis": -1}, num_outputs=2)
    total = tape.op("ReduceLogSumExp", [logits, constant([-1])])
    summary = tape.op("Concat", [largest, total], {"axis": -1})
    return tape.op("Add", [hidden, tape.op("MatMul", [summary, weight])])


def route_attributes(pieces: Pieces) -> dict[str, str | float]:
    """What the plugin needs to know beside its inputs. `norm` is "rms", "layer", or "graph" where the tail is something
    else, which only the function's body computes."""
    attributes: dict[str, str | float] = {
        "plugin_namespace": PLUGIN_NAMESPACE,
        "plugin_version": PLUGIN_VERSION,
        "norm": "graph",
        "epsilon": 0.0,
    }
    nodes = list(pieces.tail)
    if len(nodes) == 1 and nodes[0].op_type in _NORMS and nodes[0].inputs[0] is pieces.tail.inputs[0]:
        attributes["norm"] = _NORMS[nodes[0].op_type]
        attributes["epsilon"] = nodes[0].attributes.get_float("epsilon", 1e-5)
    return attributes


def normed_size(pieces: Pieces) -> int:
    """Width D' of what routers and head see."""
    return static_dim(pieces.tail.outputs[0], -1)


def _declared(attributes: dict[str, str | float]) -> list[ir.Attr]:
    return [ir.AttrFloat32(k, v) if isinstance(v, float) else ir.AttrString(k, v) for k, v in attributes.items()]
