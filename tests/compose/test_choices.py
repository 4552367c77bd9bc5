"""The networks that choose from the head's logits, in ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tide_export.compose.segments import compose_choices
from tide_export.names import segment_networks as names
from tide_export.names.networks import BEST, CANDIDATES

Sessions = dict[str, ort.InferenceSession]


@pytest.fixture(scope="module", params=[1000, 100])  # of which one is less than the most that are found
def vocabulary(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def sessions(vocabulary: int, tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    folder: Path = tmp_path_factory.mktemp("choices")
    found = {}
    for name, model in compose_choices(vocabulary).items():
        ir.save(model, folder / f"{name}.onnx")
        found[name] = ort.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
    return found


def drawn(count: int, vocabulary: int) -> np.ndarray:
    """Logits with many equal ones, as of a head in bfloat16."""
    logits = np.random.default_rng(0).normal(0, 3, (count, vocabulary)).astype(np.float32)
    logits[0::3] = np.round(logits[0::3] * 8) / 8
    logits[1::3] = np.round(logits[1::3])
    logits[2:, 5] = -np.inf
    return logits


def test_they_find_the_largest_logits_and_the_first_of_equal_ones(sessions: Sessions, vocabulary: int) -> None:
    logits = drawn(30, vocabulary)
    tokens, best = sessions[BEST].run([names.BEST_TOKENS, names.BEST_LOGITS], {names.LOGITS: logits})
    np.testing.assert_array_equal(tokens, logits.argmax(1))
    np.testing.assert_array_equal(best, logits.max(1))
    values, ids = sessions[CANDIDATES].run([names.CANDIDATE_LOGITS, names.CANDIDATE_TOKENS], {names.LOGITS: logits})
    assert values.shape == (30, min(names.MAX_CANDIDATES, vocabulary))
    np.testing.assert_array_equal(values, -np.sort(-logits, axis=1)[:, : values.shape[1]])
    np.testing.assert_array_equal(np.take_along_axis(logits, ids, 1), values)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_is_seen(sessions: Sessions, vocabulary: int, broken: float) -> None:
    logits = drawn(3, vocabulary)
    logits[1, 77] = broken
    (best,) = sessions[BEST].run([names.BEST_LOGITS], {names.LOGITS: logits})
    (values,) = sessions[CANDIDATES].run([names.CANDIDATE_LOGITS], {names.LOGITS: logits})
    assert np.isfinite(best).tolist() == np.isfinite(values[:, 0]).tolist() == [True, False, True]
