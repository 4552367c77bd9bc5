"""Converts a network to float16 or bfloat16, except routers, logits, sinks and attention biases.

TensorRT takes each type as the graph declares it. Norms keep their sums in float32 (`stash_type`), as does the router,
whose input is cast for it; logits are cast at the end. Weights are converted when they are written, one at a time, and
rounded as PyTorch's half precision rounds them; a number beyond float16's largest is refused.
"""

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from tide_export.compose.cut import is_attention
from tide_export.compose.exit_op import SCORE, stays_float32
from tide_export.errors import GraphError
from tide_export.graph.rewriting import FLOAT, HALF, new_node, required
from tide_export.lower.tensorrt.scatter_attention import BIAS, SINKS
from tide_export.names.operators import DOMAIN, OP_EXIT
from tide_export.names.segment_networks import LOGITS


class HalfPrecisionPass(ir.passes.InPlacePass):
    """Use one instance for all networks of a model, so that a tensor they share remains one tensor."""

    def __init__(self, weights: str):
        """`weights`: "fp16" or "bf16"."""
        super().__init__()
        self.dtype = HALF[weights]
        self.converted: dict[str, ir.LazyTensor] = {}

    def requires(self, model: ir.Model) -> None:
        for node in model.graph:
            if any(value.dtype is None for value in node.outputs if value.uses()):
                raise ir.passes.PreconditionError(f"the trace lost the type of {node.op_type} {node.name}")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for value in list(_convertible(graph)):
            if value.is_initializer():
                value.const_value = self._convert(value)
            value.type = ir.TensorType(self.dtype)
        for node in list(graph):
            if node.op_type == "Cast" and node.attributes["to"].as_int() == FLOAT.value:
                node.attributes["to"] = ir.AttrInt64("to", self.dtype.value)
            constant = node.attributes.get("value")
            if node.op_type in ("Constant", "ConstantOfShape") and constant is not None:
                tensor = constant.as_tensor()
                if tensor.dtype == FLOAT:
                    node.attributes["value"] = ir.AttrTensor(
                        "value", ir.tensor(tensor.numpy().astype(self.dtype.numpy()))
                    )
        self._widen_logits(graph)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        for value in _convertible(model.graph):
            if value.name != LOGITS:
                raise ir.passes.PostconditionError(f"{value.name} is still float32")

    def _widen_logits(self, graph: ir.Graph) -> None:
        for index, value in enumerate(graph.outputs):
            if value.name == LOGITS:
                value.name = f"{LOGITS}_half"
                types = [(FLOAT, value.shape)]
                cast = new_node("Cast", [value], {"to": FLOAT.value}, name="logits/Cast", outputs=types)
                cast.outputs[0].name = LOGITS
                graph.append(cast)
                graph.outputs[index] = cast.outputs[0]

    def _convert(self, value: ir.Value) -> ir.LazyTensor:
        name, tensor = str(value.name), required(value.const_value)
        if name not in self.converted:
            self.converted[name] = ir.LazyTensor(
                self._rounded(name, tensor), dtype=self.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
            )
        return self.converted[name]

    def _rounded(self, name: str, tensor: ir.TensorProtocol) -> Callable[[], ir.TensorProtocol]:
        def compute() -> ir.TensorProtocol:
            array = tensor.numpy()
            _check_range(name, array, self.dtype.numpy())
            with np.errstate(over="ignore"):
                return ir.tensor(array.astype(self.dtype.numpy()), name=name, dtype=self.dtype)

        return compute


def _convertible(graph: ir.Graph) -> Iterator[ir.Value]:
    """The float32 values, except scores and what only routers, sinks and attention biases read."""
    for value in (*graph.initializers.values(), *graph.inputs):
        uses = [(use.node, use.idx) for use in value.uses()]
        wide = bool(uses) and all(_is_routers(node, index) or _is_added_to_scores(node, index) for node, index in uses)
        if value.dtype == FLOAT and not wide:
            yield value
    for node in graph:
        score = node.outputs[SCORE] if _is_exit(node) else None
        yield from (value for value in node.outputs if value.dtype == FLOAT and value is not score)


def check_weights(piece: ir.Graph, weights: str) -> None:
    """Checks that no weight of `piece` holds a number too large for `weights`.

    `piece` is part of a cut trace. Raises GraphError.
    """
    for name, value in piece.initializers.items():
        added_to_scores = [is_attention(use.node) and use.idx > 2 for use in value.uses()]
        if value.dtype == FLOAT and value.const_value is not None and not (added_to_scores and all(added_to_scores)):
            _check_range(name, value.const_value.numpy(), HALF[weights].numpy())


def _check_range(name: str, array: np.ndarray, half: np.dtype) -> None:
    ends = np.array([array.min(initial=0), array.max(initial=0)])
    if not np.isfinite(ends).all():
        return _check_range(name, array[np.isfinite(array)], half)
    with np.errstate(over="ignore"):
        if not np.isfinite(ends.astype(half).astype(np.float32)).all():
            raise GraphError(f"weight {name} holds a number too large for {half}: use bf16 or fp32")
    return None


def _is_exit(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, OP_EXIT)


def _is_routers(node: ir.Node, index: int) -> bool:
    """Whether input `index` of `node` is one of a router's, which computes in float32."""
    return _is_exit(node) and stays_float32(node, index)


def _is_added_to_scores(node: ir.Node, index: int) -> bool:
    """Whether an input of an attention is one that `ScatterAttentionPass` takes in float32."""
    return is_attention(node) and index in (SINKS, BIAS)
