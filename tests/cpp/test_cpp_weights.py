"""Weights in bfloat16, float16 and integers, and K/V in int8, in the C++ runtime, which has the operators in itself: to
the bit as in Python."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cpp_engine import CppEngine, facts
from families import build
from tiny_configs import CHECKPOINTS
from tiny_engines import engine_of

from tide_export.bundle.manifest import FLOAT32_KV, INT8_KV, Quantization
from tide_export.names import OP_HALF_MATMUL
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.half import round_to_half
from tide_export.routers.random_routers import random_routers
from tide_export.thresholds.resolve import NEVER_EXIT

IDS = [(i * 37) % 500 + 3 for i in range(40)]


@pytest.mark.parametrize(
    ("weights", "kv_cache"),
    [("bf16", FLOAT32_KV), ("int4", FLOAT32_KV), ("fp16", INT8_KV), ("int4", INT8_KV), ("int8", INT8_KV)],
)
def test_tokens_and_scores(
    weights: str, kv_cache: str, operator_library: Path, open_cpp: Callable[..., CppEngine], tmp_path: Path
) -> None:
    source = build("llama")
    half = weights if weights in OP_HALF_MATMUL else None
    if half is not None:
        round_to_half(source, half)
    else:
        quantize_model(source, Quantization("rtn", int(weights[-1]), 32, symmetric=True, accuracy_level=4))
    routers = random_routers(source, CHECKPOINTS, IDS)
    python = engine_of(source, routers, tmp_path / "bundle", batch=True, half=half, kv_cache=kv_cache)
    assert python.manifest.weights == weights
    cpp = open_cpp(tmp_path / "bundle")
    for call in ({"mode": "full"}, {"mode": "exit", "threshold": 0.5, "max_pending": 2}, {"mode": "lossless"}):
        both = (e.generate(IDS, max_new_tokens=24, stop_token_ids=[], **call) for e in (python, cpp))
        first, second = map(facts, both)
        assert first == second
        several = {"max_new_tokens": 12, "stop_token_ids": [], **call}
        batches = python.generate([IDS, IDS[:7]], **several), cpp.generate_batch([IDS, IDS[:7]], **several)
        first, second = (list(map(facts, batch)) for batch in batches)
        assert first == second
    steps = (engine.start([NEVER_EXIT] * len(CHECKPOINTS)).step(IDS[:9]).logits.copy() for engine in (python, cpp))
    np.testing.assert_array_equal(*steps)
