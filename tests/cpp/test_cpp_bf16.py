"""Bundles with weights in bfloat16 and in integers in the C++ runtime, which has the operators in itself: to the bit as
in Python."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cpp_engine import CppEngine, facts
from families import build
from tiny_configs import CHECKPOINTS
from tiny_engines import engine_of

from tide_export.bundle.manifest import Quantization
from tide_export.quantize.bf16 import round_to_bf16
from tide_export.quantize.flow import quantize_model
from tide_export.routers.random_routers import random_routers
from tide_export.thresholds.resolve import NEVER_EXIT

IDS = [(i * 37) % 500 + 3 for i in range(40)]


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_tokens_and_scores(
    weights: str, operator_library: Path, open_cpp: Callable[..., CppEngine], tmp_path: Path
) -> None:
    source = build("llama")
    if weights == "bf16":
        round_to_bf16(source)
    else:
        quantize_model(source, Quantization("rtn", 4, 32, symmetric=True, accuracy_level=4))
    routers = random_routers(source, CHECKPOINTS, IDS)
    python = engine_of(source, routers, tmp_path / "bundle", batch=True, bf16=weights == "bf16")
    assert python.manifest.weights == weights
    cpp = open_cpp(tmp_path / "bundle")
    for options in ({"mode": "full"}, {"mode": "exit", "threshold": 0.5, "max_pending": 2}, {"mode": "lossless"}):
        both = (e.generate(IDS, max_new_tokens=24, stop_token_ids=[], **options) for e in (python, cpp))
        first, second = map(facts, both)
        assert first == second
    steps = (engine.start([NEVER_EXIT] * len(CHECKPOINTS)).step(IDS[:9]).logits.copy() for engine in (python, cpp))
    np.testing.assert_array_equal(*steps)
