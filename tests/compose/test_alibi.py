"""The bias of a step: the table's columns up to the sequence's length, relative to the last, a row per new token."""

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from tide_export.compose.alibi import relative_biases, step_biases
from tide_export.compose.builder import Block, Weights
from tide_export.compose.cut import Pieces
from tide_export.names import DOMAIN, OP_ATTENTION

RNG = np.random.default_rng(0)
FLOAT = ir.DataType.FLOAT


def piece(tables: list[np.ndarray | None]) -> ir.Graph:
    """A segment with an attention per table, None for one without."""
    x = ir.Value(name="x", type=ir.TensorType(FLOAT), shape=ir.Shape([1, "s", 8]))
    weights = {}
    nodes = []
    for table in tables:
        inputs = [x, x, x]
        if table is not None:
            name = f"table_{id(table)}"
            weights[name] = weights.get(name) or ir.Value(
                name=name,
                type=ir.TensorType(FLOAT),
                shape=ir.Shape(table.shape),
                const_value=ir.tensor(table, name=name),
            )
            inputs += [None, weights[name]]
        nodes.append(ir.node(OP_ATTENTION, inputs, domain=DOMAIN))
    outputs = [nodes[-1].outputs[0]]
    return ir.Graph([x], outputs, nodes=nodes, initializers=list(weights.values()), name="segment")


def test_a_step_adds_the_bias_of_its_keys_to_each_of_its_rows_and_a_shared_table_is_read_once() -> None:
    first, second = (RNG.normal(size=(3, 20)).astype(np.float32) for _ in range(2))
    segments = (piece([first, None, first]), piece([first, second]))
    pieces = Pieces((0, 3, 5), segments[0], segments, segments[0], segments[0], ((3, 8),) * 5, tuple(range(5)))
    block = Block("main", Weights())
    total = ir.Value(name="total", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([]))
    x = ir.Value(name="x", type=ir.TensorType(FLOAT), shape=ir.Shape([1, "n", 8]))
    relative = relative_biases(block, pieces, total)
    assert len(relative) == 2
    biases = step_biases(block, segments[1], relative, x, "n")
    assert biases.keys() == relative.keys()
    assert sum(node.op_type == "Expand" for node in block.nodes) == 2
    graph = ir.Graph(
        [total, x],
        list(biases.values()),
        nodes=block.nodes,
        initializers=list(block.weights.values.values()),
        opset_imports={"": 23},
        name="bias",
    )
    evaluator = ReferenceEvaluator(ir.serde.serialize_model(ir.Model(graph, ir_version=10)))
    for length, tokens in ((1, 1), (17, 1), (20, 6)):
        results = evaluator.run(
            None, {"total": np.array(length, np.int32), "x": np.zeros((1, tokens, 8), dtype=np.float32)}
        )
        for table, bias in zip((first, second), results, strict=True):
            expected = table[:, :length] - table[:, length - 1 : length]
            np.testing.assert_array_equal(bias, np.repeat(expected[None, :, None], tokens, axis=2))


def test_a_model_without_biases_has_nothing_added() -> None:
    plain = piece([None, None])
    pieces = Pieces((0, 2), plain, (plain,), plain, plain, ((3, 8),) * 2, (0, 1))
    block = Block("main", Weights())
    total = ir.Value(name="total", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([]))
    assert relative_biases(block, pieces, total) == {}
    assert step_biases(block, plain, {}, plain.inputs[0], "n") == {}
    assert block.nodes == []
    assert block.weights.values == {}
