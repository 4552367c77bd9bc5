"""The segment networks on PyTorch give the tokens, exits and counts of the graph."""

import pytest
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.errors import ProviderError
from tide_export.runtime.engine import Engine
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


def test_a_bundle_without_segment_networks_is_refused(tiny_llama: TinyLlama) -> None:
    with pytest.raises(ProviderError, match="holds no segment networks"):
        open_torch(open_bundle(tiny_llama.propagating))
