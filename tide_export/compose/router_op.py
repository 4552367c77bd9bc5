"""The router as a `tide::TideRoute` function: MLP (with the shortlist's say), sigmoid, threshold.

Written by `compose` once per model and called once per checkpoint. One definition serves two back ends: ONNX Runtime
inlines the function's body of standard ops; TensorRT, where a plugin of that name is registered, takes the plugin,
because the calling node carries `plugin_namespace` and `plugin_version`. The `norm` attribute says which norm the op
does first: "none" here, where the norm in front also serves the head.
"""

import onnx_ir as ir

from tide_export.compose.cut import Pieces, static_dim
from tide_export.names import DOMAIN, OP_ROUTE, PLUGIN_NAMESPACE, PLUGIN_VERSION
from tide_export.routers.router import RouterArrays
from tide_export.trace.tracer import OPSET

_NORMS = {"RMSNormalization": "rms", "LayerNormalization": "layer"}


def route_function(router: RouterArrays, opset: int = OPSET) -> ir.Function:
    """TideRoute(normed [B, 1, D'], threshold [1], down [D', R], up [R, 1], bias [1], ...) -> score, exit [B, 1, 1].

    ONNX Runtime's one graph gives it matrices instead, normed [1, D'] -> score, exit [1, 1]: there biases and sigmoids
    fuse with the products. With a shortlist of N tokens two more inputs follow, shortlist [D', N] and confidence
    [2, R]. Score is float32 in [0, 1], exit is bool, true where score > threshold (never for NaN).

    Args:
        router: any of the model's routers; all are of one form.
        opset: of the model it goes into.
    """
    names = ["normed_states", "threshold", "down_weight", "up_weight", "bias"]
    if router.confidence is not None:
        names += ["shortlist_weight", "confidence_weight"]
    parameters = [ir.Value(name=name) for name in names]
    normed, threshold, down, up, bias = parameters[:5]
    tape = ir.tape.Tape()
    z = tape.op("MatMul", [normed, down])
    if router.confidence is not None:
        logits = tape.op("MatMul", [normed, parameters[5]])
        two = tape.op("Constant", [], {"value_ints": [2]})
        summary, _ = tape.op_multi_out(
            "TopK", [tape.op("LogSoftmax", [logits], {"axis": -1}), two], {"axis": -1}, num_outputs=2
        )
        z = tape.op("Add", [z, tape.op("MatMul", [summary, parameters[6]])])
    z = tape.op("Mul", [z, tape.op("Sigmoid", [z])])
    score = tape.op("Sigmoid", [tape.op("Add", [tape.op("MatMul", [z, up]), bias])])
    leaves = tape.op("Greater", [score, threshold])
    nodes = list(tape.nodes)
    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
        for index, value in enumerate(node.outputs):
            value.name, value.type, value.shape = f"{node.name}_out_{index}", None, None
    score.name, leaves.name = "score", "exit"
    body = ir.Graph(
        parameters,
        [score, leaves],
        nodes=nodes,
        opset_imports={"": opset},
        name=OP_ROUTE,
    )
    return ir.Function(DOMAIN, OP_ROUTE, graph=body, attributes=_declared(route_attributes()))


def route_attributes() -> dict[str, str | float]:
    """What the plugin needs to know beside its inputs."""
    return {"plugin_namespace": PLUGIN_NAMESPACE, "plugin_version": PLUGIN_VERSION, "norm": "none", "epsilon": 0.0}


def norm_kind(pieces: Pieces) -> str | None:
    """ "rms" or "layer" where the model's tail is such a norm and nothing else."""
    nodes = list(pieces.tail)
    if len(nodes) == 1 and nodes[0].op_type in _NORMS and nodes[0].inputs[0] is pieces.tail.inputs[0]:
        return _NORMS[nodes[0].op_type]
    return None


def normed_size(pieces: Pieces) -> int:
    """Width D' of what routers and head see."""
    return static_dim(pieces.tail.outputs[0], -1)


def _declared(attributes: dict[str, str | float]) -> list[ir.Attr]:
    return [ir.AttrFloat32(k, v) if isinstance(v, float) else ir.AttrString(k, v) for k, v in attributes.items()]
