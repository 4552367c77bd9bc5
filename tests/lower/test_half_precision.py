"""Segment networks in float16 beside float32, at positions whose angles float16 does not hold."""

from pathlib import Path

import numpy as np
import pytest
from families import build
from networks_runner import Runner

from tide_export.compose.cut import cut
from tide_export.lower.tensorrt.lower import networks_for_tensorrt
from tide_export.names.segment_networks import past
from tide_export.routers.random_routers import random_routers

CAPACITY, TOKENS, RUN = 2048, 1500, 500


@pytest.mark.parametrize("family", ["deepseek_v2", "ministral3"])
def test_late_positions_are_rounded_no_more_than_early_ones(family: str, traces, tmp_path: Path) -> None:
    """Rotary angles of complex numbers, and queries scaled by position: by what keys and logits differ."""
    source = build(family)
    routers = random_routers(source, (1,), range(3, 43), bottleneck=16, lens_rank=4)
    pieces = cut(traces(source, routers.checkpoints, CAPACITY), CAPACITY)
    ids = np.random.default_rng(0).integers(3, 500, (1, TOKENS))
    keys, logits = {}, {}
    for weights, dtype in {"fp32": np.float32, "fp16": np.float16}.items():
        networks = networks_for_tensorrt(pieces, routers.arrays(), routers.lens_arrays(), CAPACITY, weights)
        folder = tmp_path / weights
        folder.mkdir()
        networks.save(folder)
        runner = Runner(folder, rows=1, dtype=dtype)
        for start in range(0, TOKENS, RUN):
            logits[weights], _, _ = runner.full(ids[:, start : start + RUN], [start], [RUN - 1])
        keys[weights] = runner.buffers[past(0, "key")][0, :, :TOKENS].astype(np.float32)
    errors = np.abs(keys["fp16"] - keys["fp32"]).max((0, 2)) / np.abs(keys["fp32"]).max()
    assert 1e-5 < errors[:100].max() < 5e-3
    assert errors[-100:].max() < 3 * errors[:100].max()
    assert np.abs(logits["fp16"] - logits["fp32"]).max() < 1e-2 * np.abs(logits["fp32"]).max()
