"""Every float32 tensor of a network becomes float16 or bfloat16, but for routers, logits, sinks and attention biases.

For networks of one segment (`lower.tensorrt.lower`): TensorRT takes each type as the graph says it. Norms keep their
sums in float32 (`stash_type`), as does the router, whose input is cast for it; logits are cast at the end. Weights are
converted when they are written, one at a time. What a weight or state is rounded to is what PyTorch's own half
precision would round it to; a number beyond float16's largest is refused.

Precondition: the network's values carry their types. Postcondition: no float32 value outside routers, logits,
and attention's sinks and biases.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir

from tide_export.errors import GraphError
from tide_export.lower.rewriting import add_before
from tide_export.lower.tensorrt.scatter_attention import BIAS, SINKS
from tide_export.names import DOMAIN, LOGITS, OP_ATTENTION, OP_ROUTE

FLOAT = ir.DataType.FLOAT
TYPES: dict[str, tuple[ir.DataType, type]] = {
    "fp16": (ir.DataType.FLOAT16, np.float16),
    "bf16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16),
}


class HalfPrecisionPass(ir.passes.InPlacePass):
    """One instance serves all networks of a model, so that a tensor they share stays one tensor."""

    def __init__(self, weights: str):
        """`weights`: "fp16" or "bf16"."""
        super().__init__()
        self.dtype, self.numpy = TYPES[weights]
        self.converted: dict[str, ir.LazyTensor] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for value in list(graph.initializers.values()):
            if value.dtype == FLOAT and not self._stays_wide(value):
                value.const_value = self._convert(value)
                value.type = ir.TensorType(self.dtype)
        for value in graph.inputs:
            if value.dtype == FLOAT and not self._stays_wide(value):
                value.type = ir.TensorType(self.dtype)
        for node in list(graph):
            if _is_router(node):
                self._widen_input(node)
                continue
            if node.op_type == "Cast" and node.attributes["to"].as_int() == FLOAT.value:
                node.attributes["to"] = ir.AttrInt64("to", self.dtype.value)
            constant = node.attributes.get("value")
            if node.op_type in ("Constant", "ConstantOfShape") and constant is not None:
                tensor = constant.as_tensor()
                if tensor.dtype == FLOAT:
                    node.attributes["value"] = ir.AttrTensor("value", ir.tensor(tensor.numpy().astype(self.numpy)))
            for value in node.outputs:
                if value.dtype == FLOAT:
                    value.type = ir.TensorType(self.dtype)
        self._widen_logits(graph)
        return ir.passes.PassResult(model, modified=True)

    def _stays_wide(self, value: ir.Value) -> bool:
        uses = [(use.node, use.idx) for use in value.uses()]
        return bool(uses) and all(_is_router(node) or _is_added_to_scores(node, index) for node, index in uses)

    def _widen_input(self, router: ir.Node) -> None:
        state = router.inputs[0]
        assert state is not None
        kinds = [(FLOAT, state.shape)]
        wide = add_before(router, "Cast", [state], {"to": FLOAT.value}, outputs=kinds).outputs[0]
        router.replace_input_with(0, wide)

    def _widen_logits(self, graph: ir.Graph) -> None:
        for index, value in enumerate(graph.outputs):
            if value.name == LOGITS:
                value.name = f"{LOGITS}_half"
                cast = ir.node("Cast", [value], attributes={"to": FLOAT.value}, num_outputs=1, name="logits/Cast")
                wide = cast.outputs[0]
                wide.name, wide.type, wide.shape = LOGITS, ir.TensorType(FLOAT), value.shape
                graph.append(cast)
                graph.outputs[index] = wide

    def _convert(self, value: ir.Value) -> ir.LazyTensor:
        name, tensor = value.name, value.const_value
        assert name is not None
        assert tensor is not None
        if name not in self.converted:
            self.converted[name] = ir.LazyTensor(
                self._rounded(name, tensor), dtype=self.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
            )
        return self.converted[name]

    def _rounded(self, name: str, tensor: ir.TensorProtocol) -> Callable[[], ir.TensorProtocol]:
        def make() -> ir.TensorProtocol:
            array = tensor.numpy()
            _check_range(name, array, self.numpy)
            with np.errstate(over="ignore"):
                return ir.tensor(array.astype(self.numpy), name=name, dtype=self.dtype)

        return make


def check_weights(piece: ir.Graph, weights: str) -> None:
    """Raises GraphError if a weight of `piece`, part of a cut trace, holds a number too large for `weights`."""
    for name, value in piece.initializers.items():
        added = [(use.node.domain, use.node.op_type) == (DOMAIN, OP_ATTENTION) and use.idx > 2 for use in value.uses()]
        if value.dtype == FLOAT and value.const_value is not None and not (added and all(added)):
            _check_range(name, value.const_value.numpy(), TYPES[weights][1])


def _check_range(name: str, array: np.ndarray, half: type) -> None:
    ends = np.array([array.min(initial=0), array.max(initial=0)])
    if not np.isfinite(ends).all():
        return _check_range(name, array[np.isfinite(array)], half)
    with np.errstate(over="ignore"):
        if not np.isfinite(ends.astype(half).astype(np.float32)).all():
            raise GraphError(f"weight {name} holds a number too large for {half.__name__}: use bf16 or fp32")
    return None


def _is_router(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, OP_ROUTE)


def _is_added_to_scores(node: ir.Node, index: int) -> bool:
    """Whether it is an input of an attention that `ScatterAttentionPass` takes in float32."""
    return (node.domain, node.op_type) == (DOMAIN, OP_ATTENTION) and index in (SINKS, BIAS)
