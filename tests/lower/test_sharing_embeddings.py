"""Which matrix becomes the input `embedding`, in small networks."""

import numpy as np
import onnx_ir as ir
import pytest

from tide_export.graph.rewriting import FLOAT, INT64, typed_value
from tide_export.lower.tensorrt.shared_embedding import share_embedding
from tide_export.names import segment_networks as names
from tide_export.names.networks import HEAD, segment_name

TOKENS, WIDTH = 6, 4


def matrix(name: str, dtype: type = np.float32) -> ir.Value:
    tensor = ir.tensor(np.ones((TOKENS, WIDTH), dtype), name=name)
    return ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)


def segment(*tables: ir.Value) -> ir.Model:
    """Looks up the ids in each table, and adds."""
    ids = typed_value(names.INPUT_IDS, INT64, ["batch", "tokens"])
    nodes = [ir.node("Gather", [table, ids]) for table in tables]
    nodes.append(ir.node("Sum", [node.outputs[0] for node in nodes]))
    return model([ids], nodes, tables)


def head(table: ir.Value, transposed: bool = True) -> ir.Model:
    states = typed_value("states", FLOAT, [1, "tokens", WIDTH])
    if not transposed:
        return model([states], [ir.node("Gemm", [states, table], {"transB": 1})], [table])
    last = ir.node("MatMul", [states, ir.node("Transpose", [table], {"perm": [1, 0]}).outputs[0]])
    last.outputs[0].type, last.outputs[0].shape = ir.TensorType(FLOAT), ir.Shape([1, "tokens", TOKENS])
    return model([states], [last.inputs[1].producer(), last], [table])


def model(inputs: list[ir.Value], nodes: list[ir.Node], weights) -> ir.Model:
    graph = ir.Graph(
        inputs, nodes[-1].outputs, nodes=nodes, initializers=list(weights), opset_imports={"": 24}, name="g"
    )
    return ir.Model(graph, ir_version=11)


def shared(first: ir.Model, last: ir.Model) -> tuple[object, list[bool]]:
    """What is found, and which of the two networks take the input."""
    found = share_embedding({segment_name(0): first, HEAD: last}, "fp32")
    takes = [names.EMBEDDING in [value.name for value in each.graph.inputs] for each in (first, last)]
    return found and found.info.tied, takes


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (segment(matrix("a")), head(matrix("a")), (True, [True, True])),
        (segment(matrix("a")), head(matrix("b")), (False, [True, False])),
        (segment(matrix("a"), matrix("b")), head(matrix("b")), (True, [True, True])),
        (segment(matrix("a"), matrix("b")), head(matrix("c")), (None, [False, False])),
        (segment(matrix("a")), head(matrix("a"), transposed=False), (False, [True, False])),
        (segment(matrix("a", np.float16)), head(matrix("b")), (None, [False, False])),
    ],
    ids=["tied", "not tied", "two tables, one tied", "two tables", "read in another way", "another precision"],
)
def test_the_embedding_is_the_one_table_or_that_of_the_head(first: ir.Model, last: ir.Model, expected) -> None:
    assert shared(first, last) == expected


def test_a_tied_head_multiplies_matrices_of_two_dimensions() -> None:
    last = head(matrix("a"))
    shared(segment(matrix("a")), last)
    (product,) = (node for node in last.graph if node.op_type == "MatMul")
    assert [len(value.shape) for value in (product.inputs[0], product.outputs[0])] == [2, 2]
