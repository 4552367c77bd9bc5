"""The prefix caches of both runtimes: the same requests have the same tokens, hits and bytes in both, step by step; and
the tokens are those without a cache."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from c_interface import CEngine
from cpp_engine import CppEngine, facts
from cpp_scheduler import CppHandle, CppScheduler
from test_cpp_memory import failures
from tiny_configs import CHECKPOINTS
from tiny_engines import engine_of, pieces_of

from tide_export.bundle.manifest import INT8_KV
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduling.prefix_cache import BLOCK_TOKENS
from tide_export.runtime.scheduler import SchedulerLimits

REQUESTS = 36
EXITS: dict[str, Any] = {"mode": "exit", "threshold": [0.5, 0.5], "min_layers": 0}
LOSSLESS: dict[str, Any] = {"mode": "lossless", "threshold": [0.5, 0.5], "max_pending": 3, "prompt_lookup": 3}
FULL: dict[str, Any] = {"mode": "full", "max_new_tokens": 4, "stop_token_ids": []}
PROMPT = [(7 * i) % 31 for i in range(40)]


def limits_of(engine: Engine, blocks: int) -> SchedulerLimits:
    """With room for so many blocks."""
    size = blocks * BLOCK_TOKENS * engine.manifest.kv_token_bytes
    return SchedulerLimits(slots=3, prompt_tokens=21, prefix_cache_bytes=size)


def options_of(engine: Engine, sampled: bool) -> list[dict[str, Any]]:
    options = [{"mode": "full"}, EXITS, EXITS | {"threshold": 0.3}]
    if engine.manifest.kv_cache_strategy == "exact":
        options += [EXITS | {"max_pending": 30}, LOSSLESS]
    changes = [{"temperature": 0.9, "seed": n} if sampled else {} for n in range(len(options))]
    return [one | change for one, change in zip(options, changes, strict=True)]


def conversations(
    scheduler: Any, options: list[dict[str, Any]], vocabulary: int
) -> tuple[list[Any], list[tuple[list[int], dict[str, Any], Any]]]:
    """Submits prompts that begin alike, and the next turns of some; what each step did, and each request's handle."""
    order, trace, asked = random.Random(5), list[Any](), list[Any]()
    texts = [[order.randrange(vocabulary) for _ in range(60)] for _ in range(2)]
    while len(asked) < REQUESTS or scheduler.running or scheduler.waiting:
        for _ in range(order.randrange(3) if len(asked) < REQUESTS else 0):
            text = order.choice(texts)
            prompt = text[: order.choice((1, 16, 17, 32, 33, 48, 60, 90))] + [7] * order.choice((0, 0, 1))
            chosen = order.choice(options) | {"max_new_tokens": order.choice((1, 4, 15)), "stop_token_ids": []}
            asked.append((prompt, chosen, scheduler.submit(prompt, **chosen)))
        if asked:
            prompt, _, handle = order.choice(asked)
            if handle.finish_reason == "length" and order.random() < 0.5:
                texts.append([*prompt, *handle.tokens, *[9] * 20])
            elif order.random() < 0.1:
                handle.cancel()
        scheduler.step()
        trace.append((scheduler.running, scheduler.waiting, scheduler.prefix_cache_bytes))
    return trace, asked


@pytest.fixture(scope="module")
def int8(tiny_llama, operator_library: Path, traces, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with K/V in int8."""
    folder, pieces = (
        tmp_path_factory.mktemp("int8") / "bundle",
        pieces_of(tiny_llama.source, CHECKPOINTS, traces=traces),
    )
    engine_of(tiny_llama.source, tiny_llama.routers, folder, pieces, batch=True, kv_cache=INT8_KV)
    return folder


@pytest.fixture(params=["exact", "propagating", "int8"])
def python(request: pytest.FixtureRequest, tiny_llama) -> Engine:
    kind = request.param
    return tiny_llama.graph(request.getfixturevalue("int8") if kind == "int8" else getattr(tiny_llama, kind))


@pytest.fixture
def cpp_engine(python: Engine, open_cpp: Callable[..., CppEngine]) -> CppEngine:
    return open_cpp(python.bundle.path)


@pytest.mark.parametrize("blocks", [3, 1000])
def test_both_keep_the_same(python: Engine, cpp_engine: CppEngine, blocks: int) -> None:
    limits, vocabulary = limits_of(python, blocks), python.manifest.model.vocab_size
    options = options_of(python, sampled=False)
    expected, judged = conversations(python.scheduler(limits), options, vocabulary)
    trace, asked = conversations(CppScheduler(cpp_engine, limits), options, vocabulary)
    assert trace == expected
    assert (max(held for *_, held in trace) == limits.prefix_cache_bytes) == (blocks == 3), "bounded, and used"
    cached = [handle.cached_tokens for *_, handle in asked]
    assert cached == [handle.cached_tokens for *_, handle in judged]
    assert sum(cached) > (30 if blocks == 3 else 300)
    for (prompt, chosen, handle), (*_, other) in zip(asked, judged, strict=True):
        found = handle.result()
        assert facts(found) == facts(other.result())
        assert found.tokens == cpp_engine.generate(prompt, **chosen).tokens[: len(found.tokens)]


def test_sampled_tokens_are_those_without_a_cache(python: Engine, cpp_engine: CppEngine) -> None:
    scheduler, options = CppScheduler(cpp_engine, limits_of(python, 1000)), options_of(python, sampled=True)
    _, asked = conversations(scheduler, options, python.manifest.model.vocab_size)
    assert sum(handle.cached_tokens for *_, handle in asked) > 300
    for prompt, chosen, handle in asked:
        tokens = handle.result().tokens
        assert tokens == cpp_engine.generate(prompt, **chosen).tokens[: len(tokens)]


def test_a_step_without_memory_ends_its_request_or_caches_less(python: Engine, cpp_engine: CppEngine) -> None:
    limits, outcomes = limits_of(python, 1000), set[tuple[bool, int]]()
    prompts = [PROMPT, [*PROMPT[:32], *PROMPT]]
    expected = [cpp_engine.generate(prompt, **FULL).tokens for prompt in prompts]

    def begun() -> tuple[CppScheduler, CppHandle]:
        scheduler = CppScheduler(cpp_engine, limits)
        assert scheduler.submit(prompts[0], **FULL).result().tokens == expected[0]
        return scheduler, scheduler.submit(prompts[1], **FULL)

    for (scheduler, handle), _ in failures(cpp_engine, begun, lambda both: both[0].step()):
        held = scheduler.prefix_cache_bytes
        while scheduler.step():
            pass
        described = handle.described()
        outcomes.add((described["failed"], held))
        tokens = described["tokens"]
        assert tokens == (expected[1][: len(tokens)] if described["failed"] else expected[1])
        for prompt, right in zip(prompts, expected, strict=True):
            again = scheduler.submit(prompt, **FULL)
            assert again.result().tokens == right
            assert again.cached_tokens >= 32
    assert {failed for failed, _ in outcomes} == {False, True}
    assert len({held for failed, held in outcomes if not failed}) > 1, "some cached less in this step"


def test_in_c(c_library: Any, tiny_llama) -> None:
    engine = CEngine(c_library, tiny_llama.exact)
    scheduler, generated = engine.scheduler(prefix_cache_bytes=2**20), []
    for _ in range(2):
        request = scheduler.submit(PROMPT, **FULL)
        generated.append((request.result().tokens, request.cached_tokens))
        request.close()
    tokens = engine.generate(PROMPT, **FULL).tokens
    assert generated == [(tokens, 0), (tokens, 32)]
    scheduler.close()
    engine.close()
