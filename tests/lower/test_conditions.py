"""Passes check what they require and ensure; a violation ends as one sentence that names the node."""

import numpy as np
import onnx_ir as ir
import pytest

from tide_export.errors import GraphError
from tide_export.graph.rewriting import FLOAT, INT64, ensure_none_left, new_node, nodes_of, run_passes, typed_value
from tide_export.lower.onnxruntime.attention import PagedAttentionPass
from tide_export.lower.onnxruntime.expert_matmul import ExpertMatMulPass
from tide_export.lower.onnxruntime.packed_projections import PackedProjectionsPass
from tide_export.lower.onnxruntime.quantized_matmuls import QuantizedMatMulsPass
from tide_export.lower.tensorrt.expert_gather import ExpertGatherPass
from tide_export.lower.tensorrt.half_precision import HalfPrecisionPass
from tide_export.lower.tensorrt.scatter_attention import ScatterAttentionPass
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_EXPERT_MATMUL, OP_QUANTIZED_MATMUL


def model(
    op_type: str, inputs: int, outputs: int = 1, attributes: dict | None = None, domain: str = DOMAIN
) -> ir.Model:
    """One node named `layer_7` on inputs that are computed elsewhere."""
    values = [typed_value(f"i{number}", FLOAT, [2, 4]) for number in range(inputs)]
    types = [(FLOAT, [2, 4])] * outputs
    node = new_node(op_type, values, attributes, name="layer_7", domain=domain, outputs=types)
    return ir.Model(ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23, DOMAIN: 1}), ir_version=10)


@pytest.mark.parametrize(
    ("rewrite", "graph", "sentence"),
    [
        (PagedAttentionPass("float32"), model(OP_ATTENTION, 3), "TideAttention layer_7 has 3 inputs and 1 outputs"),
        (
            ScatterAttentionPass(folds_queries=False),
            model(OP_ATTENTION, 8, 3),
            "TideAttention layer_7 has 8 inputs and 3 outputs",
        ),
        (ExpertGatherPass(), model(OP_EXPERT_MATMUL, 2), "TideExpertMatMul layer_7 has 2 inputs and 1 outputs"),
        (ExpertMatMulPass(), model(OP_EXPERT_MATMUL, 3), "the expert weights of layer_7 are not stored tensors"),
        (PackedProjectionsPass(), model(OP_ATTENTION, 8, 3), "packed after attention is lowered"),
        (
            QuantizedMatMulsPass({}, None),
            model(OP_QUANTIZED_MATMUL, 1, attributes={"weights": ["layers.7.weight"]}),
            "multiplies by layers.7.weight, which was not quantized",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ir.passes.PassBase) else "",
)
def test_a_graph_a_pass_cannot_take_is_one_sentence(
    rewrite: ir.passes.PassBase, graph: ir.Model, sentence: str
) -> None:
    with pytest.raises(GraphError, match=sentence) as caught:
        run_passes(graph, rewrite)
    assert "\n" not in str(caught.value)


def test_a_value_whose_type_was_lost_is_not_halved() -> None:
    graph = model("Relu", 1, domain="")
    (node,) = graph.graph
    reader = new_node("Relu", [node.outputs[0]], name="reader", outputs=[(FLOAT, [2, 4])])
    graph.graph.append(reader)
    node.outputs[0].type = None
    with pytest.raises(GraphError, match="lost the type of Relu layer_7"):
        run_passes(graph, HalfPrecisionPass("fp16"))


def test_a_pass_that_leaves_a_node_it_should_replace_is_found_out() -> None:
    class Idle(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            return ir.passes.PassResult(model, modified=False)

        def ensures(self, model: ir.Model) -> None:
            ensure_none_left(nodes_of(model.graph, OP_ATTENTION, DOMAIN))

    with pytest.raises(GraphError, match="still holds TideAttention layer_7"):
        run_passes(model(OP_ATTENTION, 3), Idle())
    run_passes(model(OP_EXPERT_MATMUL, 3), Idle())


def test_stored_expert_weights_are_taken() -> None:
    graph = model(OP_EXPERT_MATMUL, 2, attributes={"num_experts": 2, "transposed": 1})
    (node,) = graph.graph
    weights = ir.tensor(np.zeros((2, 4, 4), np.float32), name="experts")
    value = ir.Value(name="experts", type=ir.TensorType(FLOAT), shape=ir.Shape([2, 4, 4]), const_value=weights)
    graph.graph.register_initializer(value)
    node.resize_inputs(3)
    node.replace_input_with(2, value)
    node.inputs[1].type = ir.TensorType(INT64)
    run_passes(graph, ExpertMatMulPass())
    assert [node.op_type for node in graph.graph].count("MatMul") == 2
