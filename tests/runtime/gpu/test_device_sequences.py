"""One sequence on segment networks, on the host and on the stand-in GPU: tokens, exits and counts of the graph."""

import gc
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caller_networks import CallersNetworks, Run, callers_engine
from fake_cudart import FakeCudart
from generations import NEW_TOKENS, alone, facts, together
from judge import TEXT
from tiny_configs import CHECKPOINTS, CONTEXT, LAYERS
from tiny_engines import MAX_TOKENS

from tide_export.bundle.opened import open_bundle
from tide_export.errors import GenerationError
from tide_export.names import segment_networks as names
from tide_export.names.networks import segment_name
from tide_export.runtime.engine import Engine, open_engine

REPEATED = TEXT[:30] * 2  # so that lookups come to something
PROMPTS = [TEXT[:1], TEXT[5:7], TEXT[:17], REPEATED, [*REPEATED, *REPEATED, *TEXT]]
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    **{f"exit, {most} pending": {"max_pending": most} for most in (0, 1, 4, 16)},
    "lossless": {"mode": "lossless", "max_pending": 4},
    "lossless, lookups": {"mode": "lossless", "max_pending": 2, "prompt_lookup": 5},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "drawn, lossless": {"mode": "lossless", "temperature": 0.3, "top_k": 2, "max_pending": 3, "seed": 3},
}


def chosen(name: str, thresholds: list[float]) -> dict[str, Any]:
    options = OPTIONS[name]
    return options if options.get("mode") == "full" else options | {"threshold": thresholds, "min_layers": 0}


@pytest.mark.parametrize("name", OPTIONS)
def test_everything_is_the_graph_s(graph: Engine, engine: Engine, thresholds: list[float], name: str) -> None:
    options = chosen(name, thresholds)
    expected = alone(graph, PROMPTS, **options)
    assert [facts(one) for one in alone(engine, PROMPTS, **options)] == [facts(one) for one in expected]
    if options.get("mode") == "lossless":
        assert sum(one.stats.drafted for one in expected) > sum(one.stats.accepted for one in expected) > 0
    else:
        layers = {layer for one in expected for layer in one.stats.exit_layer}
        assert layers == ({LAYERS} if name == "full" else {*CHECKPOINTS, LAYERS})


def test_no_more_is_pending_than_a_run_takes(graph: Engine, engine: Engine) -> None:
    exits = {"threshold": 0.0, "min_layers": 0, "max_new_tokens": 60}
    expected = alone(graph, PROMPTS, max_pending=(MAX_TOKENS - 1) // 2, **exits)  # before each of two segments
    assert [facts(one) for one in alone(engine, PROMPTS, max_pending=1000, **exits)] == [facts(one) for one in expected]


def test_the_whole_context_and_no_token_more(graph: Engine, engine: Engine, thresholds: list[float]) -> None:
    """So near the end of the buffers that nothing can be padded."""
    text = [TEXT[i % len(TEXT)] for i in range(CONTEXT)]
    for mode in ("exit", "lossless"):
        options = {"mode": mode, "threshold": thresholds, "min_layers": 0, "max_pending": 4}
        prompts = [text[: CONTEXT - room] for room in (0, 1, 3, 6)]
        expected = alone(graph, prompts, **options)
        assert [one.finish_reason for one in expected] == ["context"] * 4
        assert [facts(one) for one in alone(engine, prompts, **options)] == [facts(one) for one in expected]


def test_attention_reads_no_more_of_the_buffers_than_the_sequences_take(
    demo_bundle: Path, device: FakeCudart | None
) -> None:
    """512 of 1024 positions up to the 512th token, however the step is run."""
    bundle, random = open_bundle(demo_bundle, verify=False), np.random.default_rng(0)
    cpu, (engine, networks) = open_engine(bundle, "cpu", threads=1), callers_engine(bundle, device)
    seen = set[tuple[int, int]]()

    def note(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
        if names.KEY_INDICES in tensors:
            seen.add((len(tensors[names.KEY_INDICES]), int(tensors[names.PAST_LENGTHS].max()) + run[1]))

    networks.after = note
    for generate, prompts in ((alone, [500]), (together, [40, 503, 7])):
        texts = [random.integers(3, 4000, count).tolist() for count in prompts]
        options: dict[str, Any] = {"max_new_tokens": 20, "threshold": 0.6, "min_layers": 0, "max_pending": 4}
        found, expected = (generate(one, texts, **options) for one in (engine, cpu))
        assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert {keys for keys, _ in seen} == {512, 1024}
    assert all(length <= 512 for keys, length in seen if keys == 512)
    assert min(length for keys, length in seen if keys == 1024) in range(500, 520), "a step is over all it may run"


def test_buffers_are_used_again_and_by_one_sequence_at_a_time(
    graph: Engine, engine: Engine, thresholds: list[float]
) -> None:
    options = {"threshold": thresholds, "min_layers": 0}
    engine.start([0.0, 0.0], 1000).step(TEXT)  # leaves its K/V, and what is pending, in buffers
    expected = [facts(one) for one in alone(graph, PROMPTS, **options)]
    found: dict[int, list[dict]] = {}

    def work(number: int) -> None:
        found[number] = [facts(one) for one in alone(engine, PROMPTS, **options)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [expected] * 3


def test_a_sequence_that_has_ended_gives_its_memory_to_the_next(on_gpu: Any, cudart: FakeCudart) -> None:
    gc.collect(1)  # young objects: all take seconds in a process of many tests
    before = cudart.allocated, cudart.objects
    engine, networks = on_gpu()
    sequence = engine.start([0.5, 0.5])
    sequence.step(TEXT)
    other, held = engine.start([0.5, 0.5]), cudart.allocated
    assert networks.opened == 2
    del sequence
    third = engine.start([0.5, 0.5])
    third.step(TEXT)
    assert (networks.opened, cudart.allocated) == (2, held)
    del other, third, engine
    assert networks.opened == 0
    assert (cudart.allocated, cudart.objects) == before


OVERFLOWING = 501  # a token that no model here generates


def overflow(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
    """Makes all that a run writes of a sequence NaN in which the token is the first, as half precision may."""
    if run[0] != segment_name(0):
        return
    for number in np.flatnonzero(tensors[names.INPUT_IDS][:, 0] == OVERFLOWING):
        written = slice(tensors[names.PAST_LENGTHS][number], tensors[names.PAST_LENGTHS][number] + run[1])
        for name, tensor in tensors.items():
            if name.startswith("past_key_values."):
                tensor[number, :, written] = np.nan
            elif name in (names.NEXT_PENDING_STATES, names.EXIT_STATES):
                tensor[number] = np.nan


def test_nothing_of_a_sequence_reaches_the_next_not_even_nan(
    callers: tuple[Engine, CallersNetworks], thresholds: list[float]
) -> None:
    """In K/V, in what is pending, in what is padded with."""
    engine, networks = callers
    networks.after = overflow
    options = {"threshold": thresholds, "min_layers": 0, "max_pending": 3}
    before = [facts(one) for one in alone(engine, PROMPTS, **options)]
    for _ in range(2):
        with pytest.raises(GenerationError, match="not finite"):
            engine.generate([OVERFLOWING, *TEXT], max_new_tokens=NEW_TOKENS, **options)
        assert [facts(one) for one in alone(engine, PROMPTS, **options)] == before
    with pytest.raises(GenerationError, match="not finite"):  # and all of it is pending
        engine.generate([OVERFLOWING, *TEXT[:8]], threshold=0.0, min_layers=0, max_pending=1000)
    state = engine.start([0.0, 0.0], 1000)
    for token in TEXT[:2]:
        state.step([token])
    assert np.isfinite(state.step([7], full=True).logits).all()  # over three tokens, padded to four
    assert networks.opened == 1, "all of them had the same buffers"
