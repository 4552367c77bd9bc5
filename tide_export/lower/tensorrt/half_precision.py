"""Converts a network to float16 or bfloat16, except what would lose by it.

Routers, logits, sinks and attention biases stay float32, and rotary angles and scales computed from positions.

TensorRT takes each type as the graph declares it. Norms keep their sums in float32 (`stash_type`), as does the router,
whose input is cast for it; logits are cast at the end. What positions give is cast where hidden states meet it, as
transformers does: float16 holds no odd position above 2048, bfloat16 none above 256. Weights are converted when they
are written, one at a time, and rounded as PyTorch's half precision rounds them; a number beyond float16's largest is
refused.
"""

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from tide_export.compose.cut import is_attention
from tide_export.compose.exit_op import SCORE, stays_float32
from tide_export.errors import GraphError
from tide_export.graph.rewriting import FLOAT, HALF, INT32, INT64, new_node, op_before, required
from tide_export.lower.tensorrt.scatter_attention import BIAS, SINKS
from tide_export.names.operators import DOMAIN, OP_EXIT
from tide_export.names.segment_networks import INPUT_IDS, LOGITS


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
        positions = of_positions(graph)
        for value in list(_convertible(graph, positions.values)):
            if value.is_initializer():
                value.const_value = self._convert(value)
            value.type = ir.TensorType(self.dtype)
        self._narrow(graph, positions)
        for node in list(graph):
            if node in positions.nodes:
                continue
            if node.op_type == "Cast" and node.attributes["to"].as_int() == FLOAT.value:
                node.attributes["to"] = ir.AttrInt64("to", self.dtype.value)
            constant = node.attributes.get("value")
            if node.op_type in ("Constant", "ConstantOfShape") and node.outputs[0].dtype == self.dtype:
                array = np.zeros(1, np.float32) if constant is None else constant.as_tensor().numpy()
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array.astype(self.dtype.numpy())))
        self._widen_logits(graph)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        for value in _convertible(model.graph, of_positions(model.graph).values):
            if value.name != LOGITS:
                raise ir.passes.PostconditionError(f"{value.name} is still float32")

    def _narrow(self, graph: ir.Graph, positions: "OfPositions") -> None:
        """Casts what positions give where a node that computes in half precision reads it."""
        narrow: dict[ir.Value, ir.Value] = {}
        for node in list(graph):
            if node in positions.nodes or node.op_type == "Shape":
                continue
            for index, value in enumerate(node.inputs):
                if value is None or value not in positions.values:
                    continue
                if _is_routers(node, index) or _is_added_to_scores(node, index):
                    continue
                if value not in narrow:
                    to, suffix = {"to": self.dtype.value}, f"_narrow_{len(narrow)}"
                    narrow[value] = op_before(
                        node, "Cast", [value], to, dtype=self.dtype, shape=value.shape, suffix=suffix
                    )
                node.replace_input_with(index, narrow[value])

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


class OfPositions(NamedTuple):
    """The part of a graph that positions alone determine.

    Attributes:
        nodes: that compute it.
        values: float32 values that they give or read.
    """

    nodes: Collection[ir.Node]
    values: Collection[ir.Value]


def of_positions(graph: ir.Graph) -> OfPositions:
    """Returns what follows from positions: all integer inputs but token ids; and its constants.

    A row of a table of weights is not of it: in half precision it is the same number.
    """
    given = {value for value in graph.inputs if value.dtype in (INT32, INT64) and value.name != INPUT_IDS}
    constant = set(graph.initializers.values())
    for node in graph:
        inputs = {value for value in node.inputs if value is not None}
        takes_row = node.op_type.startswith("Gather") and node.inputs[0] in constant
        if inputs <= constant or node.op_type == "Shape":
            constant.update(node.outputs)
        elif inputs <= constant | given and not takes_row:
            given.update(node.outputs)
    nodes, values = set[ir.Node](), set[ir.Value]()
    for node in reversed(graph):
        floats = [value for value in (*node.inputs, *node.outputs) if value is not None and value.dtype == FLOAT]
        if node.outputs[0] in given or (node.op_type != "Shape" and not values.isdisjoint(node.outputs)):
            nodes.add(node)
            values.update(floats)
    return OfPositions(nodes, values)


def _convertible(graph: ir.Graph, wide: Collection[ir.Value]) -> Iterator[ir.Value]:
    """The float32 values, except `wide`, scores and what only routers, sinks and attention biases read."""
    for value in (*graph.initializers.values(), *graph.inputs):
        uses = [(use.node, use.idx) for use in value.uses()]
        kept = bool(uses) and all(_is_routers(node, index) or _is_added_to_scores(node, index) for node, index in uses)
        if value.dtype == FLOAT and not kept and value not in wide:
            yield value
    for node in graph:
        score = node.outputs[SCORE] if _is_exit(node) else None
        outputs = (value for value in node.outputs if value is not score and value not in wide)
        yield from (value for value in outputs if value.dtype == FLOAT)


def check_weights(piece: ir.Graph, weights: str) -> None:
    """Checks that no weight of `piece` holds a number too large for `weights`.

    `piece` is part of a cut trace. Raises GraphError.
    """
    wide = of_positions(piece).values
    for name, value in piece.initializers.items():
        added_to_scores = [is_attention(use.node) and use.idx > 2 for use in value.uses()]
        kept = value in wide or (added_to_scores and all(added_to_scores))
        if value.dtype == FLOAT and value.const_value is not None and not kept:
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
