"""The segment networks on PyTorch give the tokens, exits and counts of the graph."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from bundles import with_manifest
from drafters import drafting_copy
from families import build
from judge import TEXT
from tiny_configs import CHECKPOINTS
from tiny_engines import TinyLlama, bundle_of, pieces_of, segments_of

from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import open_bundle
from tide_export.errors import ProviderError
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import Engine, open_engine
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.pytorch.networks import open_torch

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(20)]]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def networks(tiny_llama: TinyLlama) -> Engine:
    return open_torch(open_bundle(tiny_llama.exact))


@pytest.mark.parametrize("max_pending", [1, 1000])
def test_every_mode_gives_the_graph_s_tokens_alone_and_in_a_batch(
    tiny_llama: TinyLlama, networks: Engine, max_pending: int
) -> None:
    graph = tiny_llama.graph(tiny_llama.exact)
    mixed = dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)
    exits = {"threshold": mixed, "max_pending": max_pending, "min_layers": 0}
    for given in ({"mode": "full"}, {"mode": "exit", **exits}, {"mode": "lossless", **exits}):
        options = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": [], **given}
        expected = [graph.generate(prompt, **options) for prompt in PROMPTS]
        for found in (
            [networks.generate(prompt, **options) for prompt in PROMPTS],
            networks.generate(PROMPTS, **options),
        ):
            assert [one.tokens for one in found] == [one.tokens for one in expected]
        if given["mode"] == "exit":
            assert [one.stats.exit_layer for one in found] == [one.stats.exit_layer for one in expected]


def test_a_bundle_without_segment_networks_is_refused(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="holds no segment networks"):
        open_torch(open_bundle(with_manifest(tiny_llama.exact, tmp_path, networks=None)))


@pytest.mark.parametrize("weights", tiers.exhaustive_beyond(1, ["fp16", "bf16"]))
def test_a_drafter_of_half_precision_drafts(weights: str, tmp_path: Path) -> None:
    """The full model's tokens in that precision, alone and in a list; in bfloat16 no other engine here runs it."""
    source = build("llama")
    routers = random_routers(source, CHECKPOINTS, TEXT, bottleneck=16)
    pieces = pieces_of(source, CHECKPOINTS)
    bundle_of(source, routers, tmp_path / "b", pieces)
    bundle = open_bundle(drafting_copy(segments_of(source, routers, tmp_path / "b", pieces, weights).path, tmp_path))
    free = Drafting((1.0, 1.0), 0, 0, (1.0, 1.0), (0.0,) * 5, {}, 4, 0.0)
    engines = [open_torch(bundle)] + ([open_engine(bundle, "cpu-networks", 1)] if weights == "fp16" else [])
    graph = open_engine(bundle, "cpu", 1)
    for engine in engines:
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": [], "temperature": 0.7, "seed": 2}
        full = [engine.generate(prompt, mode="full", states=True, **options) for prompt in PROMPTS]
        drafting = engine.drafting_as(free)
        alone = [drafting.generate(prompt, mode="lossless", **options) for prompt in PROMPTS]
        for found in (alone, drafting.generate(PROMPTS, mode="lossless", **options)):
            assert [one.tokens for one in found] == [one.tokens for one in full]
            assert all(one.stats.learned_drafted for one in found)
        prompt = PROMPTS[-1]
        expected = graph.generate(prompt, mode="full", states=True, max_new_tokens=1).states
        assert full[-1].states is not None
        assert expected is not None
        np.testing.assert_allclose(full[-1].states[: len(prompt)], expected, atol=0.1 * np.abs(expected).max())
