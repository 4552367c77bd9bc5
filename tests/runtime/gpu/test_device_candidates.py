"""Only what tokens are chosen from crosses to the host: the same tokens as from all logits, however equal ones are
ordered. With log-probabilities, all logits cross."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tiers
from caller_networks import CallersNetworks, Run
from fake_cudart import FakeCudart
from generations import NEW_TOKENS, PROMPTS, alone, exits, together
from judge import TEXT
from tiny_engines import MAX_LOGITS

from tide_export.errors import GenerationError
from tide_export.names import segment_networks as names
from tide_export.names.networks import BEST, CANDIDATES, HEAD
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.runtime.stepping import sample

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.3, "top_k": 127, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 128},
    {"temperature": 1.0, "top_k": 300},
    {"temperature": 1.0, "top_p": 0.9},
]


class Rounded:
    """Makes many logits equal, as a head in half precision does, and gives equal candidates in an order of its own."""

    def __init__(self, steps: float) -> None:
        self._steps, self._random = steps, np.random.default_rng(0)

    def __call__(self, run: Run, tensors: Mapping[str, np.ndarray]) -> None:
        logits = tensors.get(names.LOGITS)
        if run[0] == HEAD:
            logits[...] = np.round(logits * self._steps) / self._steps
        elif run[0] == CANDIDATES:
            shuffled = self._random.permutation(logits.shape[1])
            order = shuffled[np.argsort(-logits[:, shuffled], axis=1, kind="stable")][:, : names.MAX_CANDIDATES]
            tensors[names.CANDIDATE_TOKENS][...] = order
            tensors[names.CANDIDATE_LOGITS][...] = np.take_along_axis(logits, order, 1)


@pytest.mark.parametrize("steps", tiers.exhaustive_beyond(1, [2.0, 30.0]))
@pytest.mark.parametrize("mode", ["full", "exit", "lossless"])
def test_tokens_are_those_of_all_logits(
    callers: tuple[Engine, CallersNetworks], thresholds: list[float], mode: str, steps: float
) -> None:
    engine, networks = callers
    networks.after = Rounded(steps)
    options = {"mode": mode} | ({} if mode == "full" else {"threshold": thresholds, "min_layers": 0})
    for number, sampling in enumerate(SAMPLING):
        drawn = options | sampling | {"max_new_tokens": 10} | ({"seed": number} if sampling else {})
        for generate in (alone, together):
            few, every = (generate(engine, PROMPTS[:3], **drawn, **more) for more in ({}, {"logprobs": 0}))
            assert [exits(one) for one in few] == [exits(one) for one in every]
            assert few[0].logprobs is None


def test_equal_logits_beyond_what_was_found_are_fetched(callers: tuple[Engine, CallersNetworks]) -> None:
    """Of equal ones the first count, wherever they are."""
    engine, networks = callers
    logits = np.full(engine.manifest.model.vocab_size, 1.0, np.float32)
    logits[500] = 2.0
    shuffled = Rounded(1.0)

    def equal(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
        if run[0] == HEAD:
            tensors[names.LOGITS][...] = logits
        shuffled(run, tensors)

    networks.after = equal
    drawn = {"temperature": 1.0, "top_k": 10, "seed": 3}
    found = engine.generate(TEXT[:4], max_new_tokens=100, stop_token_ids=[], mode="full", **drawn).tokens
    assert found == [sample(logits, 4 + number, **drawn) for number in range(100)]
    assert set(found) == {*range(9), 500}


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 2}, {"temperature": 1.0}], ids=str)
def test_logits_that_are_not_finite_are_refused(
    callers: tuple[Engine, CallersNetworks], broken: float, sampling: dict[str, Any]
) -> None:
    engine, networks = callers

    def breaks(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
        if run[0] == HEAD:
            tensors[names.LOGITS][:, 77] = broken

    networks.after = breaks
    with pytest.raises(GenerationError, match="the model's logits are not finite"):
        engine.generate(TEXT[:4], mode="full", **sampling)


def test_what_crosses_to_the_host(on_gpu: Any, cudart: FakeCudart) -> None:
    """At full depth, where nothing else does."""
    engine, networks = on_gpu()
    size = 4 * engine.manifest.model.vocab_size

    def bytes_of(**sampling: Any) -> tuple[float, set[str]]:
        """Of a token, and which networks ran."""
        networks.runs.clear()
        before = cudart.downloaded
        engine.generate(TEXT[:4], max_new_tokens=10, mode="full", stop_token_ids=[], **sampling)
        return (cudart.downloaded - before) / 10, {name for name, _, _ in networks.runs if "segment" not in name}

    scores = 2 * 512  # of two routers, and whether they exit; each in a part of its own
    greedy, ran = bytes_of()
    assert greedy <= 512 + scores
    assert ran == {HEAD, BEST}
    some, ran = bytes_of(temperature=1.0, top_k=40)
    assert greedy < some <= 12 * names.MAX_CANDIDATES * MAX_LOGITS + 512 + scores
    assert ran == {HEAD, CANDIDATES}
    for sampling in ({"logprobs": 2}, {"temperature": 1.0, "top_k": names.MAX_CANDIDATES}, {"temperature": 1.0}):
        every, ran = bytes_of(**sampling)
        assert size <= every <= size + scores
        assert ran == {HEAD}


def test_requests_with_and_without_all_logits_share_a_step(graph: Engine, on_gpu: Any, cudart: FakeCudart) -> None:
    """One run of the head serves them, and only the rows that need it cross."""
    engine, networks = on_gpu()
    given: dict[str, Any] = {"mode": "full", "max_new_tokens": NEW_TOKENS, "stop_token_ids": []}
    requests: list[dict[str, Any]] = [{}, {"logprobs": 1}, {"temperature": 1.0, "top_k": 5, "seed": 3}]
    scheduler = engine.scheduler(SchedulerLimits(slots=3))
    handles = [scheduler.submit(TEXT[n : n + 4], **given, **more) for n, more in enumerate(requests)]
    scheduler.step()
    networks.runs.clear()
    before = cudart.downloaded
    scheduler.step()
    assert [run for run in networks.runs if "segment" not in run[0]] == [
        (name, 4, 3) for name in (HEAD, BEST, CANDIDATES)
    ]
    size = 4 * engine.manifest.model.vocab_size
    crossed = cudart.downloaded - before - 12 * names.MAX_CANDIDATES * MAX_LOGITS
    assert crossed <= size + 3 * 512, "of one request"
    expected = [graph.generate(TEXT[n : n + 4], **given, **more) for n, more in enumerate(requests)]
    assert [handle.result().tokens for handle in handles] == [one.tokens for one in expected]


def test_requests_of_all_kinds_share_steps(graph: Engine, engine: Engine) -> None:
    """As they come and go, the same number of rows is of other kinds."""
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 1}, {"temperature": 1.0, "top_k": 5, "seed": 3}]
    scheduler, random, requests = engine.scheduler(SchedulerLimits(slots=3)), np.random.default_rng(0), []
    for number in range(36):
        drawn = {"max_new_tokens": int(random.integers(2, 9)), "stop_token_ids": []}
        more = {"mode": "full", **drawn, **kinds[random.integers(3) if number > 9 else 1 + number % 2]}
        requests.append((scheduler.submit(TEXT[number : number + 4], **more), TEXT[number : number + 4], more))
    for handle, prompt, more in requests:
        found, expected = handle.result(), graph.generate(prompt, **more)
        assert found.tokens == expected.tokens
        for one, other in zip(found.logprobs or [], expected.logprobs or [], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
