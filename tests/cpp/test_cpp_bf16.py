"""A bundle with weights in bfloat16 in the C++ runtime, which has the operators in itself: to the bit as in Python."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from cpp_engine import CppEngine, facts
from families import build
from tiny_configs import CHECKPOINTS
from tiny_engines import engine_of

from tide_export.quantize.bf16 import round_to_bf16
from tide_export.routers.random_routers import random_routers
from tide_export.thresholds.resolve import NEVER_EXIT

IDS = [(i * 37) % 500 + 3 for i in range(40)]


def test_tokens_and_scores(operator_library: Path, open_cpp: Callable[..., CppEngine], tmp_path: Path) -> None:
    source = build("llama")
    round_to_bf16(source)
    python = engine_of(source, random_routers(source, CHECKPOINTS, IDS), tmp_path / "bundle", batch=True, bf16=True)
    cpp = open_cpp(tmp_path / "bundle")
    for options in ({"mode": "full"}, {"mode": "exit", "threshold": 0.5, "max_pending": 2}, {"mode": "lossless"}):
        both = (e.generate(IDS, max_new_tokens=24, stop_token_ids=[], **options) for e in (python, cpp))
        first, second = map(facts, both)
        assert first == second
    steps = (engine.start([NEVER_EXIT] * len(CHECKPOINTS)).step(IDS[:9]).logits.copy() for engine in (python, cpp))
    np.testing.assert_array_equal(*steps)
