"""A drafter costs no token whatever the precision of weights and K/V, alone and in a list."""

from pathlib import Path
from typing import Any

import pytest
from drafters import drafting_copy
from families import build
from tiny_configs import CHECKPOINTS
from tiny_engines import bundle_of, pieces_of

from tide_export.bundle.manifest import INT8_KV, Drafting
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import load

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]


@pytest.mark.parametrize("options", [{"half": "bf16"}, {"half": "fp16"}, {"kv_cache": INT8_KV}], ids=str)
def test_tokens_are_those_of_full(options: dict[str, Any], tmp_path: Path) -> None:
    source = build("llama")
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16)
    pieces = pieces_of(source, CHECKPOINTS)
    bundle = bundle_of(source, routers, tmp_path / "b", pieces, **options)
    free = Drafting((1.0, 1.0), 0, 0, (1.0, 1.0), (0.0,) * 5, {}, 3, 0.0)
    engine = load(drafting_copy(bundle.path, tmp_path), threads=1).drafting_as(free)
    for temperature in (0.0, 0.9):
        given = {"temperature": temperature, "seed": 4, "max_new_tokens": 24, "stop_token_ids": []}
        full = [engine.generate(prompt, mode="full", **given) for prompt in PROMPTS]
        alone = [engine.generate(prompt, mode="lossless", **given) for prompt in PROMPTS]
        for found in (alone, engine.generate(PROMPTS, mode="lossless", **given)):
            assert [one.tokens for one in found] == [one.tokens for one in full]
            assert all(one.stats.learned_drafted for one in found)
