"""Expert matmuls for TensorRT: every row times its expert, and the number of rows a run may have."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tide_export.lower.tensorrt import expert_gather
from tide_export.lower.tensorrt.expert_gather import ExpertGatherPass, max_gathering_tokens
from tide_export.names.operators import DOMAIN, OP_EXPERT_MATMUL

EXPERTS, K, N = 3, 4, 5
FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def product(transposed: bool, chosen: int = 1, shared: bool = False) -> tuple[ir.Model, np.ndarray]:
    """`shared`: all experts of a token read one row."""
    weights = np.random.default_rng(0).standard_normal((EXPERTS, K, N) if transposed else (EXPERTS, N, K))
    weights = weights.astype(np.float32)
    rows = ir.Value(name="rows", type=ir.TensorType(FLOAT), shape=ir.Shape(["t", 1 if shared else chosen, K]))
    table = ir.Value(
        name="weights", type=ir.TensorType(FLOAT), shape=ir.Shape(weights.shape), const_value=ir.tensor(weights)
    )
    choice = ir.Value(name="choice", type=ir.TensorType(INT64), shape=ir.Shape(["t", chosen]))
    node = ir.node(
        OP_EXPERT_MATMUL,
        [rows, choice, table],
        attributes={"num_experts": EXPERTS, "transposed": int(transposed)},
        domain=DOMAIN,
        name="product",
    )
    out = node.outputs[0]
    out.name, out.type, out.shape = "product", ir.TensorType(FLOAT), ir.Shape(["t", chosen, N])
    last = ir.node("Identity", [out])
    last.outputs[0].name, last.outputs[0].type, last.outputs[0].shape = "out", out.type, out.shape
    graph = ir.Graph(
        [rows, choice],
        last.outputs,
        nodes=[node, last],
        initializers=[table],
        opset_imports={"": 24, DOMAIN: 1},
        name="experts",
    )
    return ir.Model(graph, ir_version=11), weights


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_row_is_multiplied_by_its_expert(transposed: bool, shared: bool) -> None:
    model, weights = product(transposed, 2, shared)
    ExpertGatherPass()(model)
    assert all(not node.domain for node in model.graph)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    for choice in ([[2, 0], [1, 1], [2, 2], [0, 1]], [[1, 2]] * 7, [[2, 1]]):
        rows = np.random.default_rng(1).standard_normal((len(choice), 1 if shared else 2, K)).astype(np.float32)
        (found,) = session.run(None, {"rows": rows, "choice": np.array(choice)})
        matrices = weights[choice] if transposed else weights[choice].swapaxes(-1, -2)
        every = np.broadcast_to(rows, (len(choice), 2, K))
        np.testing.assert_allclose(found, np.einsum("tck,tckn->tcn", every, matrices), atol=1e-6)


def test_a_run_has_no_more_tokens_than_may_be_gathered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = product(False, chosen=2)
    each = 2 * K * N * 4  # two experts a token
    monkeypatch.setattr(expert_gather, "GATHERED_BYTES", 10 * each + 1)
    assert max_gathering_tokens(model) == 10
    monkeypatch.setattr(expert_gather, "GATHERED_BYTES", 1)
    assert max_gathering_tokens(model) == 1
    ExpertGatherPass()(model)
    assert max_gathering_tokens(model) is None
