"""A checkpoint's operator in the library of `cpp/ops` against its function in standard operators."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from ort_sessions import opened, operators_of

from tide_export.compose.checkpoint_op import checkpoint_function
from tide_export.compose.exit_op import exit_attributes
from tide_export.names.operators import DOMAIN, OP_CANDIDATE, OP_LENS_CANDIDATE

EPSILON = 1e-5
FORMS = [*product(("rms", "layer", "none"), (False, True), (False, True))]  # norm, lens, shortlist


def weights_of(norm: str, lens: bool, shortlist: bool, width: int, hidden: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes: list[tuple[int, ...]] = [(width, hidden), (hidden, 1), (1,)]
    shapes += [(width, 300), (2, hidden)] if shortlist else []
    shapes += [(width, 7), (7, width), (width,)] if lens else []
    shapes += {"rms": [(width,)], "layer": [(width,), (width,)], "none": []}[norm]
    return [(rng.standard_normal(shape) * 0.3).astype(np.float32) for shape in shapes]


def model_of(norm: str, lens: bool, shortlist: bool, width: int, weights: list[np.ndarray]) -> bytes:
    states = ir.Value(name="states", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, "n", width]))
    last = ir.Value(name="last_tokens", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["m"]))
    thresholds = ir.Value(name="thresholds", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["m", 1]))
    stored = [ir.Value(name=f"w{i}", const_value=ir.tensor(array, name=f"w{i}")) for i, array in enumerate(weights)]
    for value in stored:
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), value.const_value.shape
    name = OP_LENS_CANDIDATE if lens else OP_CANDIDATE
    attributes = exit_attributes(norm, EPSILON, lens, shortlist)
    node = ir.node(name, [states, last, thresholds, *stored], attributes, domain=DOMAIN, num_outputs=3)
    for output, given in zip(node.outputs, ("exit_state", "score", "exits"), strict=True):
        output.name = given
        output.type = ir.TensorType(ir.DataType.BOOL if given == "exits" else ir.DataType.FLOAT)
    imports = {"": 23, DOMAIN: 1}
    graph = ir.Graph([states, last, thresholds], node.outputs, nodes=[node], initializers=stored, opset_imports=imports)
    graph.name = "checkpoint"
    model = ir.Model(graph, ir_version=10, functions=[checkpoint_function(node, 23)])
    return ir.to_proto(model).SerializeToString()


@pytest.mark.parametrize(("norm", "lens", "shortlist"), FORMS)
def test_the_operator_is_the_function(tmp_path: Path, norm: str, lens: bool, shortlist: bool) -> None:
    width = 72
    model = model_of(norm, lens, shortlist, width, weights_of(norm, lens, shortlist, width, 130))
    session, plain = opened(model, tmp_path), opened(model, operators=False)
    for seed, last in enumerate(([-1], [0], [6], [1, 3, 4], [0, 1, 2, 3, 4, 5, 6])):
        rng = np.random.default_rng(seed)
        states = rng.standard_normal((1, 1 if seed < 2 else 7, width), dtype=np.float32)
        inputs = {"states": states, "last_tokens": np.array(last)}
        expected = plain.run(None, inputs | {"thresholds": np.ones((len(last), 1), np.float32)})
        steps = rng.choice([-1e-3, 1e-3], (len(last), 1))
        for thresholds in (expected[1] - 1e-3, np.minimum(expected[1] + 1e-3, 1), np.minimum(expected[1] + steps, 1)):
            inputs["thresholds"] = thresholds.astype(np.float32)
            exit_state, scores, exits = session.run(None, inputs)
            np.testing.assert_allclose(exit_state, expected[0], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(scores, expected[1], atol=1e-5)
            assert exits.tolist() == (expected[1] > thresholds).tolist()
    assert {OP_CANDIDATE, OP_LENS_CANDIDATE} & operators_of(session)


def test_what_no_threshold_needs_is_not_computed() -> None:
    session = opened(model_of("rms", True, True, 16, weights_of("rms", True, True, 16, 8)))
    states = np.random.default_rng(0).standard_normal((1, 4, 16), dtype=np.float32)
    inputs = {"states": states, "last_tokens": np.array([0, 2, 3]), "thresholds": np.full((3, 1), 2, np.float32)}
    exit_state, score, exits = session.run(None, inputs)
    assert not exit_state.any()
    assert np.isnan(score).all()
    assert not exits.any()
    inputs["thresholds"][1] = 0
    exit_state, score, exits = session.run(None, inputs)
    assert exit_state.any(axis=1).tolist() == [False, True, False]
    assert np.isnan(score[:, 0]).tolist() == [True, False, True]
    assert exits[:, 0].tolist() == [False, True, False]


@pytest.mark.parametrize(("norm", "lens", "shortlist"), FORMS)
def test_a_token_gets_the_same_whatever_the_others(norm: str, lens: bool, shortlist: bool) -> None:
    session = opened(model_of(norm, lens, shortlist, 72, weights_of(norm, lens, shortlist, 72, 130)))
    states = np.random.default_rng(0).standard_normal((1, 5, 72), dtype=np.float32)
    several = session.run(None, inputs_of(states, [0, 1, 2, 3, 4]))
    for token in range(5):
        alone = session.run(None, inputs_of(states, [token]))
        assert all(np.array_equal(a[token], b[0]) for a, b in zip(several, alone, strict=True))


def inputs_of(states: np.ndarray, last: list[int], threshold: float = 0) -> dict[str, np.ndarray]:
    thresholds = np.full((len(last), 1), threshold, np.float32)
    return {"states": states, "last_tokens": np.array(last), "thresholds": thresholds}


@pytest.mark.parametrize(("width", "last"), [(12, [-1]), (16, [2]), (16, [-3])])
def test_what_does_not_fit_is_refused(width: int, last: list[int]) -> None:
    session = opened(model_of("rms", False, False, 16, weights_of("rms", False, False, width, 8)))
    with pytest.raises(
        Exception, match=r"TideCandidate takes hidden states \[1, n, D\], last tokens among the n, a threshold"
    ):
        session.run(None, inputs_of(np.ones((1, 2, 16), np.float32), last))
