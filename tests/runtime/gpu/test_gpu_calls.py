"""How many calls of CUDA a step takes, and what becomes of one that fails: an error in one sentence, or nothing; what
follows is as it was."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import tiers
from bundles import with_manifest
from caller_networks import callers_engine
from fake_cudart import OLD, FakeCudart
from generations import NEW_TOKENS, PROMPTS, alone, exits, together, tokens_of
from judge import TEXT
from tiny_engines import MAX_BATCH_SIZE, TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.errors import GenerationError, TideError
from tide_export.names.networks import CANDIDATES
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.runtime.stepping import SingleSequence, StepResult
from tide_export.thresholds.resolve import NEVER_EXIT

T = TypeVar("T")
SLOTS, STEPS = 8, 40
# Share of exits at a checkpoint, max_pending, and calls a step at most where the host decides.
SETTINGS = {"half of the tokens exit": (0.5, 1, 11.5), "most exit": (0.8, 1, 11.5), "full": (0.0, 1, 2.0)}


@pytest.mark.parametrize("decides", [True, False], ids=["gpu decides", "host decides"])
def test_calls_of_a_step_of_eight(
    graph: Engine, tiny_llama: TinyLlama, cudart: FakeCudart, tmp_path: Path, decides: bool
) -> None:
    """In the last of several rounds, when what can be recorded is: one launch and one wait where the GPU decides."""
    if not decides:
        cudart.driver = cudart.runtime = OLD
    info, state = graph.manifest.networks, graph.start([1.0, 1.0])
    assert info is not None
    wide = replace(info, max_batch_size=SLOTS)
    engine, _ = callers_engine(open_bundle(with_manifest(tiny_llama.exact, tmp_path, networks=wide)), cudart)
    scores = np.array([state.step([token]).scores.copy() for token in TEXT * 2])
    for name, (exiting, max_pending, most) in SETTINGS.items():
        thresholds = np.quantile(scores, 1 - exiting, axis=0).tolist() if exiting else [NEVER_EXIT, NEVER_EXIT]
        for _ in range(3):
            batch = engine.start_batch(1.0, SLOTS)
            slots = [batch.join(thresholds, max_pending) for _ in range(SLOTS)]
            batch.step({slot: TEXT[2 * slot : 3 * slot + 3] for slot in slots})
            before = cudart.calls()
            for n in range(STEPS):
                batch.step({slot: [TEXT[(7 * slot + 3 * n) % len(TEXT)]] for slot in slots})
            calls = (cudart.calls() - before) / STEPS
            del batch
        if decides or not exiting:
            assert calls == 2, name
        else:
            assert 4 <= calls <= most, name


# --- one that fails --------------------------------------------------------------------------------------------------


def shown(result: StepResult) -> Any:
    return result.position_logits.tobytes(), result.exit_layer, result.segments_run, result.scores.tobytes()


def again(call: Callable[[], T]) -> T:
    """Calls twice where the first time fails."""
    try:
        return call()
    except TideError as error:
        if not str(error).endswith("injected"):
            raise
        return call()


def failures(cudart: FakeCudart, every: int = 1) -> Iterator[None]:
    """Lets one call fail: of each pass the next, or one of `every`, until there are no more."""
    for number in count(1, every):
        cudart.countdown = number
        yield
        if cudart.countdown:
            assert number > 10
            cudart.countdown = 0
            return


# Tokens of one sequence that exit, are pending, are caught up with, and take a run in parts.
STEPS_OF_ONE = [TEXT[:5], *([token] for token in TEXT[5:11]), TEXT, [7], [9]]


@pytest.mark.parametrize("new", [True, False], ids=["new buffers", "used buffers"])
def test_steps_of_one_sequence(on_gpu: Any, cudart: FakeCudart, thresholds: list[float], new: bool) -> None:
    engine, _ = on_gpu()
    gc.collect(1)  # young objects: all take seconds in a process of many tests
    before = cudart.allocated, cudart.objects
    undisturbed = engine.start(thresholds, 4)
    expected = [shown(undisturbed.step(ids, 2)) for ids in STEPS_OF_ONE]
    kept = [undisturbed]
    for _ in failures(cudart, every=tiers.sized(3, 1)):
        state = again(partial(engine.start, thresholds, 4))
        for ids, result in zip(STEPS_OF_ONE, expected, strict=True):
            lengths = state.lengths

            def step(state: SingleSequence = state, ids: list[int] = ids, lengths: list[int] = lengths) -> Any:
                assert state.lengths in (
                    lengths,
                    lengths[:1] * len(lengths),
                )  # all caught up by the first of some parts
                return shown(state.step(ids, 2))

            assert again(step) == result
        if new:
            kept.append(state)
        del state, step
    kept.clear()
    del engine, undisturbed
    assert (cudart.allocated, cudart.objects) == before


def test_steps_of_a_batch(on_gpu: Any, cudart: FakeCudart, thresholds: list[float]) -> None:
    engine, _ = on_gpu()
    steps = [{0: TEXT[:5], 2: TEXT[3:4]}, {1: TEXT}, *({slot: [token] for slot in range(3)} for token in TEXT[:4])]

    def results() -> list[Any]:
        batch = again(lambda: engine.start_batch(0.5, MAX_BATCH_SIZE))
        for _ in range(MAX_BATCH_SIZE):
            again(lambda: batch.join(thresholds, 4))
        made = (again(lambda step=step: batch.step(step)) for step in steps)
        return [{slot: shown(result) for slot, result in one.items()} for one in made]

    expected = results()
    for _ in failures(cudart):
        assert results() == expected


def test_requests(on_gpu: Any, cudart: FakeCudart, thresholds: list[float]) -> None:
    """One that fails fails alone, and those that come later have its slot."""
    engine, _ = on_gpu()
    options: dict[str, Any] = {"mode": "lossless", "threshold": thresholds, "stop_token_ids": []}
    expected = [one.tokens for one in alone(engine, mode="full")]
    scheduler, failed, passes = engine.scheduler(SchedulerLimits(slots=2)), 0, 0
    for _ in failures(cudart, every=5):
        passes += 1
        handles = [scheduler.submit(prompt, max_new_tokens=NEW_TOKENS, **options) for prompt in PROMPTS]
        for handle, tokens in zip(handles, expected, strict=True):
            try:
                assert handle.result().tokens == tokens
            except GenerationError as error:
                failed += str(error).endswith("injected")
    assert 0 < failed <= passes
    assert scheduler.running == 0


def test_too_little_memory(graph: Engine, on_gpu: Any, cudart: FakeCudart) -> None:
    """Once there is enough it is as if nothing had happened."""
    expected = [exits(one) for one in alone(graph)]
    engine, _ = on_gpu()
    gc.collect(1)
    cudart.limit = cudart.allocated + (1 << 18)
    with pytest.raises(GenerationError):
        alone(engine)
    before = cudart.allocated  # of the engine: the embedding
    for generate in (alone, together):
        for _ in range(2):
            with pytest.raises(GenerationError, match="the GPU has not enough free memory for the sequence's buffers"):
                generate(engine)
            assert cudart.allocated == before
    cudart.reset()
    for generate in (alone, together):
        assert [exits(one) for one in generate(engine)] == expected


def test_queued_work_that_fails(graph: Engine, on_gpu: Any) -> None:
    """An error when it is waited for, of that request alone."""
    engine, networks = on_gpu()
    for name in networks.specs:
        options = {"temperature": 1.0, "top_k": 3, "seed": 1} if name == CANDIDATES else {}
        networks.failing_once(name)
        with pytest.raises(GenerationError, match=r"CUDA failed \(cudaStreamSynchronize\): injected"):
            alone(engine, **options)
        assert tokens_of(alone(engine, **options)) == tokens_of(alone(graph, **options))
