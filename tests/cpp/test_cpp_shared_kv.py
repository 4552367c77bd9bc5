"""The C++ runtime on a model whose layers share K/V and whose states hold per-layer embeddings: tokens, exit layers and
statistics equal Python's, on the step graph, in batches and on segment networks, also where K/V are propagated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cpp_engine import CppEngine, facts
from families import build
from tiny_engines import engine_of, lens_at_first, pieces_of, segments_of

from tide_export.bundle.manifest import PROPAGATE
from tide_export.model.source import SourceModel
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import Engine, load
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import check_exit

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]
CHECKPOINTS = (1, 2, 4)
OPTIONS = {"max_new_tokens": 24, "stop_token_ids": []}


@dataclass(frozen=True)
class SharedKV:
    """Bundles with all networks and with propagated K/V, and thresholds by which tokens exit at every checkpoint."""

    source: SourceModel
    routers: RouterSet
    exact: Path
    propagating: Path
    thresholds: list[float]


@pytest.fixture(scope="module")
def shared_kv(tmp_path_factory: pytest.TempPathFactory) -> SharedKV:
    source, folder = build("gemma4 (text)"), tmp_path_factory.mktemp("shared-kv")
    routers = lens_at_first(random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, lens_rank=4))
    pieces = pieces_of(source, CHECKPOINTS, every_layer=True)
    assert pieces.kv_layers == (0, 1, 2, 2, 1)
    assert pieces.state_size > pieces.hidden_size
    engine_of(source, routers, folder / "propagating", pieces, PROPAGATE, batch=True)
    assert not list((folder / "propagating").glob("**/skipped_03.onnx")), "layer 4 has no K/V of its own"
    exact = replace(pieces, keys_values={})
    engine_of(source, routers, folder / "exact", exact, batch=True)
    segments_of(source, routers, folder / "exact", exact)
    thresholds = dividing_thresholds(source, routers, PROMPTS[2])
    return SharedKV(source, routers, folder / "exact", folder / "propagating", thresholds)


def exits(python: Engine, cpp: CppEngine, batched: bool, **options: Any) -> set[int]:
    """The exit layers of PROMPTS, which are equal, as all else is."""
    generated = [cpp.generate(prompt, **OPTIONS, **options) for prompt in PROMPTS]
    alone = [python.generate(prompt, **OPTIONS, **options) for prompt in PROMPTS]
    assert list(map(facts, generated)) == list(map(facts, alone))
    if batched:
        batch = cpp.generate_batch(PROMPTS, **OPTIONS, **options)
        assert list(map(facts, batch)) == list(map(facts, python.generate(PROMPTS, **OPTIONS, **options)))
    return {layers for generation in generated for layers in generation.stats.exit_layer}


@pytest.mark.parametrize("networks", [None, "host"])
def test_layers_that_share_kv(networks: str | None, shared_kv: SharedKV, open_cpp: Callable[..., CppEngine]) -> None:
    python = load(shared_kv.exact, provider="cpu", threads=1)
    cpp = open_cpp(shared_kv.exact, **({} if networks is None else {"verify": False, "networks": networks}))
    decided = {"threshold": shared_kv.thresholds, "min_layers": 0}
    assert len(exits(python, cpp, networks is None, max_pending=4, **decided)) > 1
    exits(python, cpp, networks is None, mode="lossless", threshold=0.0, min_layers=0, max_pending=3)
    assert exits(python, cpp, networks is None, mode="full") == {5}


def test_propagated_kv_of_a_segment_without_its_own(shared_kv: SharedKV, open_cpp: Callable[..., CppEngine]) -> None:
    python = load(shared_kv.propagating, provider="cpu", threads=1)
    check = check_exit(python, shared_kv.source, shared_kv.routers, PROMPTS, 24, shared_kv.thresholds)
    assert check.holds, check.differences
    decided = {"threshold": shared_kv.thresholds, "min_layers": 0}
    assert len(exits(python, open_cpp(shared_kv.propagating), True, **decided)) > 1
