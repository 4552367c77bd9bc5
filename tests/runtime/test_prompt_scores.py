"""The log-probabilities of a prompt's tokens are the source model's, whatever the mode, the provider, the pieces it is
read in and what else runs; the tokens after it are those without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judge import TEXT
from tiny_engines import TinyLlama
from tiny_model import TinyModel

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import TokenLogprobs
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.verify.export_gate import dividing_thresholds

MORE: dict[str, Any] = {"max_new_tokens": 6, "stop_token_ids": [], "logprobs": 1}
LARGE = 1 << 17  # a vocabulary of which a step gives 128 rows


@pytest.fixture(scope="module", params=["graph", "networks"])
def engine(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.networks() if request.param == "networks" else tiny_llama.graph(tiny_llama.exact)


@pytest.fixture
def prefixes(request: pytest.FixtureRequest) -> int:
    """Bytes of a prefix cache, which segment networks cannot have."""
    return 0 if "networks" in request.node.name else 1 << 22


@pytest.fixture(scope="module")
def modes(tiny_llama: TinyLlama) -> dict[str, dict[str, Any]]:
    mixed = dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)
    exits: dict[str, Any] = {"mode": "exit", "threshold": mixed, "min_layers": 0}
    return {"full": {"mode": "full"}, "exit": exits, "lossless": {"mode": "lossless", "threshold": mixed}}


def check(found: list[TokenLogprobs | None] | None, logits: np.ndarray, ids: list[int]) -> None:
    """They are those of the logits [S, V] of a prompt, and of its three most likely tokens."""
    assert found is not None
    assert found[0] is None
    assert len(found) == len(ids)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    for one, row, token in zip(found[1:], expected, ids[1:], strict=False):
        assert one is not None
        assert one.logprob == pytest.approx(row[token], abs=2e-3)
        best = -np.sort(-np.partition(row, -3)[-3:])
        np.testing.assert_allclose([value for _, value in one.top], best, atol=2e-3)


@pytest.mark.parametrize("mode", ["full", "exit", "lossless"])
def test_those_of_the_source_model(
    engine: Engine, tiny_llama: TinyLlama, modes: dict[str, dict[str, Any]], prefixes: int, mode: str
) -> None:
    prompts = [TEXT, TEXT[:1], TEXT[5:7], TEXT[3:21]]
    with torch.no_grad():
        logits = [tiny_llama.source.model(torch.tensor([ids])).logits[0].numpy() for ids in prompts]
    options = modes[mode] | MORE
    expected = [engine.generate(ids, **options) for ids in prompts]
    assert expected[0].prompt_logprobs is None
    alone = [engine.generate(ids, prompt_logprobs=3, **options) for ids in prompts]
    together = engine.generate(prompts, prompt_logprobs=3, **options)
    scheduler = engine.scheduler(SchedulerLimits(slots=3, prompt_tokens=7, prefix_cache_bytes=prefixes))
    scheduler.submit(TEXT, **options).result()  # whose K/V the cache has then
    handles = [scheduler.submit(ids, prompt_logprobs=3, **options) for ids in prompts]
    assert {handle.cached_tokens for handle in handles} == {0}
    for made in (alone, together, [handle.result() for handle in handles]):
        for one, before, ids, rows in zip(made, expected, prompts, logits, strict=True):
            check(one.prompt_logprobs, rows, ids)
            assert one.tokens == before.tokens
            if mode != "lossless":  # which drafts less beside others
                assert one.stats.exit_layer == before.stats.exit_layer
    cached = scheduler.submit(TEXT, **options)
    assert cached.result().tokens == expected[0].tokens
    assert (cached.cached_tokens > 0) == (prefixes > 0)


def test_a_long_prompt_is_read_in_pieces(tmp_path: Path) -> None:
    tiny = TinyModel(vocabulary=LARGE)
    engine = load(tiny.write(tmp_path / "b"), threads=1)
    ids = [(number * 7919) % LARGE for number in range(150)]
    made = engine.generate(ids, mode="full", prompt_logprobs=3, max_new_tokens=3)
    check(made.prompt_logprobs, tiny.reference(ids, [2.0, 2.0])[0], ids)
    assert made.tokens == engine.generate(ids, mode="full", max_new_tokens=3).tokens
    assert made.stats.layer_tokens_run == 6 * (len(ids) + 2)


def test_what_is_refused(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.graph(tiny_llama.exact)
    for count, sentence in ((-1, "prompt_logprobs must be a whole number, 0 or more"), (513, "from 0 to 512, not 513")):
        with pytest.raises(GenerationError, match=sentence):
            engine.generate(TEXT, prompt_logprobs=count)
