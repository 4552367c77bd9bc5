"""`x[mask] = number` in a trace becomes a Where of the same result; similar patterns stay."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from tide_export.compose.passes.masked_fills import MaskedFillsPass
from tide_export.compose.passes.static_reshapes import StaticReshapesPass


class Fill(torch.nn.Module):
    def forward(self, ids):
        ids = ids.clone()
        ids[ids > 5] = 1
        return ids * 2


@pytest.fixture(scope="module")
def proto():
    dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    module, ids = Fill().eval(), torch.arange(6).reshape(2, 3)
    program = torch.onnx.export(module, (ids,), dynamo=True, opset_version=23, dynamic_shapes=(dims,), verbose=False)
    return ir.to_proto(program.model)


@pytest.fixture
def model(proto) -> ir.Model:
    return ir.from_proto(proto)


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


def run(model: ir.Model, ids: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: ids})[0]


def test_a_masked_fill_becomes_a_where(model: ir.Model) -> None:
    ids = np.arange(12).reshape(3, 4)[:, ::-1].copy()
    expected = run(model, ids)
    assert "NonZero" in operators(model)
    ir.passes.Sequential(StaticReshapesPass(), MaskedFillsPass(), ir.passes.common.RemoveUnusedNodesPass())(model)
    assert not {"NonZero", "ScatterND"} & operators(model)
    assert "Where" in operators(model)
    assert np.array_equal(run(model, ids), expected)
    assert np.array_equal(expected, np.where(ids > 5, 1, ids) * 2)


@pytest.mark.parametrize("change", ["reduction", "another mask"])
def test_similar_patterns_stay(change: str, model: ir.Model) -> None:
    StaticReshapesPass()(model)
    scatter = next(node for node in model.graph if node.op_type == "ScatterND")
    listing = next(node for node in model.graph if node.op_type == "NonZero")
    if change == "reduction":
        scatter.attributes["reduction"] = ir.AttrString("reduction", "add")
    else:
        listing.inputs[0].shape = ir.Shape([2, "other"])
    assert not MaskedFillsPass()(model).modified
    assert "ScatterND" in operators(model)
