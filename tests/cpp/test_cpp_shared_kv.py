"""The C++ runtime on a model whose layers share K/V and whose states hold per-layer embeddings: tokens, exit layers and
statistics equal Python's, on the step graph, in batches and on segment networks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cpp_engine import CppEngine, facts
from families import CHECKPOINTS, build
from tiny_engines import engine_of, pieces_of, segments_of

from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import Engine, load
from tide_export.verify.export_gate import dividing_thresholds

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]
OPTIONS = {"max_new_tokens": 24, "stop_token_ids": []}


@pytest.fixture(scope="module")
def shared_kv(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A bundle with all networks, and thresholds by which tokens exit at every checkpoint."""
    source, folder = build("gemma4 (text)"), tmp_path_factory.mktemp("shared-kv") / "bundle"
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, lens_rank=4)
    pieces = pieces_of(source, CHECKPOINTS)
    assert pieces.kv_layers == (0, 1, 2, 0, 2)
    assert pieces.state_size > pieces.hidden_size
    engine_of(source, routers, folder, pieces, batch=True)
    segments_of(source, routers, folder, pieces)
    return folder, dividing_thresholds(source, routers, PROMPTS[2])


@pytest.fixture(scope="module")
def python(shared_kv: tuple[Path, list[float]]) -> Engine:
    return load(shared_kv[0], provider="cpu", threads=1)


@pytest.mark.parametrize("networks", [None, "host"])
def test_layers_that_share_kv(
    networks: str | None, shared_kv: tuple[Path, list[float]], python: Engine, open_cpp: Callable[..., CppEngine]
) -> None:
    folder, thresholds = shared_kv
    cpp = open_cpp(folder, **({} if networks is None else {"verify": False, "networks": networks}))
    exits = set()
    for options in (
        {"threshold": thresholds, "max_pending": 4, "min_layers": 0},
        {"mode": "lossless", "threshold": 0.0, "min_layers": 0, "max_pending": 3},
        {"mode": "full"},
    ):
        for prompt in PROMPTS:
            generation = cpp.generate(prompt, **OPTIONS, **options)
            assert facts(generation) == facts(python.generate(prompt, **OPTIONS, **options))
            exits |= set(generation.stats.exit_layer)
        if networks is None:
            batched = cpp.generate_batch(PROMPTS, **OPTIONS, **options)
            assert list(map(facts, batched)) == list(map(facts, python.generate(PROMPTS, **OPTIONS, **options)))
    assert len(exits) > 1
