"""The router as a `tide::TideRoute` function: final norm, MLP, sigmoid, threshold.

Written by `compose` once per model and called once per checkpoint. One definition serves two back ends: ONNX Runtime
inlines the function's body of standard ops; TensorRT, where a plugin of that name is registered, takes the plugin,
because the calling node carries `plugin_namespace` and `plugin_version`.
"""

import onnx_ir as ir

from tide_export.graph.cut import Pieces, static_dim
from tide_export.names import DOMAIN, OP_ROUTE, PLUGIN_NAMESPACE, PLUGIN_VERSION

_NORMS = {"RMSNormalization": "rms", "LayerNormalization": "layer"}


def route_function(pieces: Pieces) -> ir.Function:
    """TideRoute(hidden [B, 1, D], threshold [1], down [D', R], up [R, 1], *norm weights) -> score, exit [B, 1, 1].

    The body starts with a copy of the model's own tail, so a router sees exactly what the head would; score is float32
    in [0, 1], exit is bool, true where score > threshold (never for NaN).
    """
    tail = pieces.tail.clone()
    (normed,) = tail.outputs
    hidden, threshold, down, up = (
        ir.Value(name=name) for name in ("hidden_states", "threshold", "down_weight", "up_weight")
    )
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
    z = tape.op("Mul", [z, tape.op("Sigmoid", [z])])
    score = tape.op("Sigmoid", [tape.op("MatMul", [z, up])])
    leaves = tape.op("Greater", [score, threshold])
    nodes += tape.nodes
    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
        for value in node.outputs:
            value.name, value.type, value.shape = f"{node.name}_out", None, None
    score.name, leaves.name = "score", "exit"
    body = ir.Graph(
        [hidden, threshold, down, up, *weights],
        [score, leaves],
        nodes=nodes,
        opset_imports=dict(pieces.tail.opset_imports),
        name=OP_ROUTE,
    )
    return ir.Function(DOMAIN, OP_ROUTE, graph=body, attributes=_declared(route_attributes(pieces)))


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
