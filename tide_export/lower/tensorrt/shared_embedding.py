"""Makes the embedding an input of the networks that read it, so that it lies on the GPU once.

Plans share no constants, but one address can be bound to several of them. A tied head reads the embedding as well,
and so does a drafter that is made later. The head multiplies by its transpose, which TensorRT for RTX 1.7 reads as it
lies where both matrices have two dimensions; where `hidden` has three, every run transposes the whole embedding first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tide_export.bundle.plan_fields import EmbeddingInfo
from tide_export.graph.rewriting import FLOAT, HALF, integers, op_before, replace_value, required
from tide_export.names import segment_networks as names
from tide_export.names.networks import HEAD, segment_name


@dataclass(frozen=True)
class SharedEmbedding:
    """The matrix [V, E], and whether the head reads it too."""

    matrix: ir.TensorProtocol
    tied: bool

    @property
    def info(self) -> EmbeddingInfo:
        rows, width = self.matrix.shape.numpy()
        return EmbeddingInfo(rows, width, self.tied)


def share_embedding(models: Mapping[str, ir.Model], weights: str) -> SharedEmbedding | None:
    """Replaces the embedding in segment 0 and the head by the input `names.EMBEDDING`.

    Args:
        models: by name; other networks do not read it.
        weights: fp32, fp16 or bf16: the precision that the embedding must have.

    Returns:
        None: segment 0 looks up token ids in no matrix of that precision, or in several of which the head reads none or
        several. The networks are as they were.
    """
    first, head = models[segment_name(0)].graph, models[HEAD].graph
    (ids,) = (value for value in first.inputs if value.name == names.INPUT_IDS)
    tables = {
        str(required(node.inputs[0]).name) for node, index in ids.uses() if node.op_type == "Gather" and index == 1
    }
    tables = {name for name in tables & first.initializers.keys() if _is_matrix(first.initializers[name], weights)}
    tied = tables & head.initializers.keys()
    if len(tied or tables) != 1:
        return None
    (name,) = tied or tables
    product = _product(head, name) if tied else None
    matrix = required(first.initializers[name].const_value)
    for graph in (first, head) if product is not None else (first,):
        value = graph.initializers.pop(name)
        value.name, value.const_value, value.shape = names.EMBEDDING, None, ir.Shape(matrix.shape.numpy())
        graph.inputs.append(value)
    if product is not None:
        _multiply_rows(head, product, *matrix.shape.numpy())
    return SharedEmbedding(matrix, product is not None)


def _product(head: ir.Graph, name: str) -> ir.Node | None:
    """The MatMul by the transposed embedding, if the head reads the embedding there alone."""
    users = [use.node for use in head.initializers[name].uses()]
    products = [use for node in users for use in node.outputs[0].uses() if node.op_type == "Transpose"]
    found = len(users) == len(products) == 1 and products[0].idx == 1 and products[0].node.op_type == "MatMul"
    return products[0].node if found else None


def _multiply_rows(head: ir.Graph, product: ir.Node, rows: int, width: int) -> None:
    """Lets the MatMul take `hidden` [m, E] and give logits [m, V] in place of [1, m, E] and [1, m, V]."""
    (hidden, transposed), output = map(required, product.inputs), product.outputs[0]
    shape, first = integers(head, "as_states", [-1, width]), integers(head, "axis_0", [0])
    flat = op_before(product, "Reshape", [hidden, shape], dtype=output.dtype, shape=[None, width], suffix="_states")
    logits = op_before(product, "MatMul", [flat, transposed], dtype=output.dtype, shape=[None, rows], suffix="_rows")
    replace_value(output, op_before(product, "Unsqueeze", [logits, first], dtype=output.dtype, shape=output.shape))


def _is_matrix(value: ir.Value, weights: str) -> bool:
    tensor = required(value.const_value)
    return len(tensor.shape) == 2 and tensor.dtype == HALF.get(weights, FLOAT)
