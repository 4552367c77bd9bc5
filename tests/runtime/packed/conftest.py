"""Prompts of several lengths and thresholds that divide their tokens, for whatever `engine` a test module has."""

import numpy as np
import pytest

from tide_export.runtime.engine import Engine
from tide_export.thresholds.resolve import MAX_THRESHOLD

LENGTHS = (1, 37, 100, 2, 18)


@pytest.fixture(scope="module")
def prompts(demo_text_ids: list[int]) -> list[list[int]]:
    return [demo_text_ids[100 * number : 100 * number + length] for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def mixed(engine: Engine, demo_text_ids: list[int]) -> list[float]:
    """Thresholds that about a third of what reaches each checkpoint passes, whatever the routers were trained on.

    The first token of a propagating bundle runs at full depth and is not scored: NaN."""
    state = engine.start([MAX_THRESHOLD] * len(engine.manifest.checkpoints))
    scores = np.array([state.step([token]).scores.copy() for token in demo_text_ids[600:700]])
    return np.clip(np.nanquantile(scores, 0.66, axis=0), 0.0, 1.0).tolist()
