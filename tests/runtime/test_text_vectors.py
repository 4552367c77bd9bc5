"""Vectors of texts are what the source model's head reads: its last hidden states, and those of exits."""

from typing import Any

import numpy as np
import pytest
import torch
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import AuditConfig, SchedulerLimits
from tide_export.thresholds.resolve import ALWAYS_EXIT, NEVER_EXIT
from tide_export.verify.oracle import oracle

TEXTS = [TEXT, TEXT[:1], TEXT[5:7], TEXT[3:21]]


@pytest.fixture(scope="module", params=["graph", "networks"])
def engine(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.networks() if request.param == "networks" else tiny_llama.graph(tiny_llama.exact)


@pytest.fixture(scope="module")
def states(tiny_llama: TinyLlama) -> list[np.ndarray]:
    """Hugging Face's last hidden states [S, D] of each text, after the final norm."""
    with torch.no_grad():
        made = [tiny_llama.source.model(torch.tensor([ids]), output_hidden_states=True) for ids in TEXTS]
    return [one.hidden_states[-1][0].numpy() for one in made]


def unit(vectors: Any) -> np.ndarray:
    return np.stack([vector / np.linalg.norm(vector) for vector in vectors])


def test_full_depth_gives_the_last_hidden_state(engine: Engine, states: list[np.ndarray]) -> None:
    last, mean = [one[-1] for one in states], [one.mean(axis=0) for one in states]
    close: dict[str, Any] = {"atol": 2e-4, "rtol": 2e-3}
    np.testing.assert_allclose(engine.embed(TEXTS), unit(last), **close)
    np.testing.assert_allclose(engine.embed(TEXTS, pooling="mean"), unit(mean), **close)
    np.testing.assert_allclose(engine.embed(TEXTS, normalize=False), np.stack(last), **close)
    np.testing.assert_allclose(engine.embed(TEXTS, dimensions=5), unit(one[:5] for one in last), **close)
    alone = engine.embed(np.array(TEXT))
    assert alone.dtype == np.float32
    np.testing.assert_allclose(alone, unit(last)[0], **close)


def test_a_checkpoint_gives_what_its_exit_reads(engine: Engine, tiny_llama: TinyLlama) -> None:
    points = tiny_llama.routers.checkpoints
    for number, layer in enumerate(points):
        vectors = engine.embed(TEXTS, layer=layer, normalize=False)
        never = [NEVER_EXIT] * len(points)
        never[number] = ALWAYS_EXIT
        with torch.no_grad():
            logits = tiny_llama.source.head(torch.tensor(vectors)[None])[0].numpy()
        for row, ids in zip(logits, TEXTS, strict=True):
            expected = oracle(tiny_llama.source, tiny_llama.routers, ids, never).logits[-1].numpy()
            np.testing.assert_allclose(row, expected, atol=2e-3, rtol=2e-3)
        np.testing.assert_allclose(engine.embed(TEXT, layer=layer, normalize=False), vectors[0], atol=1e-5)
        with pytest.raises(GenerationError, match="pooling 'mean' is for full depth"):
            engine.embed(TEXT, layer=layer, pooling="mean")


def test_a_checkpoint_costs_the_layers_before_it(tiny_llama: TinyLlama) -> None:
    """Without what else a scheduler has: they are not audited, and nothing of them is taken from another mode."""
    engine = tiny_llama.graph(tiny_llama.exact)
    first, *rest = tiny_llama.routers.checkpoints
    limits = SchedulerLimits(slots=2, prompt_tokens=9, prefix_cache_bytes=1 << 22)
    scheduler = engine.scheduler(limits, audit=AuditConfig(rate=1.0))
    options: dict[str, Any] = {"mode": "exit", "threshold": [0.0] + [1.0] * len(rest), "min_layers": 0, "states": True}
    made = scheduler.submit(TEXT, max_pending=1 << 30, max_new_tokens=3, stop_token_ids=[], **options).result()
    assert made.states is not None
    assert made.states.shape == (3, engine.embed(TEXT).size)
    assert made.stats.exit_layer == [first] * 3
    assert made.stats.layer_tokens_run == first * (len(TEXT) + 2)
    assert scheduler.audit is not None
    assert scheduler.audit.audited == 0
    for _ in range(2):  # the second has its K/V in the cache, and is run nevertheless
        full = scheduler.submit(TEXT, mode="full", max_new_tokens=2, stop_token_ids=[], states=True).result()
        assert full.states is not None
        np.testing.assert_allclose(full.states[len(TEXT) - 1], engine.embed(TEXT, normalize=False), atol=1e-4)
    alone = engine.generate(TEXT, max_pending=1 << 30, max_new_tokens=3, stop_token_ids=[], **options)
    np.testing.assert_array_equal(alone.states, made.states)


def test_an_identity_exit_reads_the_normalized_state(demo_bundle: Any, demo_source: Any) -> None:
    engine = load(demo_bundle, provider="cpu", threads=1)
    with torch.no_grad():
        hidden = demo_source.model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        for layer in engine.manifest.checkpoints:
            expected = demo_source.normalize(hidden[layer][0, -1]).numpy()
            np.testing.assert_allclose(engine.embed(TEXT, layer=layer), unit([expected])[0], atol=1e-3)


def test_what_is_refused(tiny_llama: TinyLlama) -> None:
    engine = tiny_llama.graph(tiny_llama.exact)
    points = tiny_llama.routers.checkpoints
    for options, sentence in (
        ({"pooling": "cls"}, "pooling must be 'last' or 'mean', not 'cls'"),
        ({"layer": points[-1] + 1}, f"layer must be a checkpoint of the bundle \\({', '.join(map(str, points))}\\)"),
        ({"dimensions": 0}, "dimensions must be a whole number, 1 or more"),
        ({"dimensions": 10_000}, "dimensions must be at most"),
    ):
        with pytest.raises(GenerationError, match=sentence):
            engine.embed(TEXT, **options)
    with pytest.raises(GenerationError, match="prompt 2 is empty"):
        engine.embed([TEXT, []])
