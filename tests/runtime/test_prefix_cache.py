"""K/V that requests share: the tokens are those without a cache, the memory is bounded, the statistics are right."""

import random
from typing import Any

import pytest
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import Scheduler, SchedulerLimits
from tide_export.verify.export_gate import dividing_thresholds

BLOCK_TOKENS = 16
SLOTS = 3
PROMPT = [token % 97 + 3 for token in range(70)]
FULL: dict[str, Any] = {"mode": "full", "max_new_tokens": 4, "stop_token_ids": []}


@pytest.fixture(scope="module")
def mixed(tiny_llama: TinyLlama) -> list[float]:
    return dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)


@pytest.fixture(scope="module", params=["exact", "propagating"])
def engine(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(getattr(tiny_llama, request.param))


def scheduler_of(engine: Engine, blocks: int, **limits: Any) -> Scheduler:
    """A scheduler whose cache has room for so many blocks."""
    size = blocks * BLOCK_TOKENS * engine.manifest.kv_token_bytes
    return engine.scheduler(SchedulerLimits(**({"slots": SLOTS} | limits), prefix_cache_bytes=size))


def run(scheduler: Scheduler, ids: list[int], **options: Any) -> tuple[list[int], int]:
    """The tokens after a prompt, and how many of its tokens were cached."""
    handle = scheduler.submit(ids, **options)
    return handle.result().tokens, handle.cached_tokens


def options_of(engine: Engine, mixed: list[float]) -> list[dict[str, Any]]:
    exits: dict[str, Any] = {"mode": "exit", "threshold": mixed, "min_layers": 0}
    options = [{"mode": "full"}, exits, {"mode": "full", "temperature": 0.8, "seed": 3}, exits | {"threshold": 0.3}]
    options.append(exits | {"temperature": 1.0, "seed": 5, "top_k": 20})
    if engine.manifest.kv_cache_strategy == "exact":
        lossless = {"mode": "lossless", "threshold": mixed}
        options += [exits | {"max_pending": 30}, lossless, lossless | {"temperature": 0.8, "seed": 3}]
    return options


@pytest.mark.parametrize("blocks", [2, 5, 1000])
def test_tokens_are_those_without_a_cache(engine: Engine, mixed: list[float], blocks: int) -> None:
    order, options = random.Random(blocks), options_of(engine, mixed)
    texts = [[order.randrange(engine.manifest.model.vocab_size) for _ in range(60)] for _ in range(2)]
    scheduler, asked, handles = scheduler_of(engine, blocks, prompt_tokens=21), [], list[Any]()
    while len(handles) < 40 or scheduler.running or scheduler.waiting:
        for _ in range(order.randrange(3) if len(handles) < 40 else 0):
            text = order.choice(texts)
            prompt = text[: order.choice((1, 2, 16, 17, 31, 32, 33, 48, 60))] + [7] * order.choice((0, 0, 1, 9))
            chosen = order.choice(options) | {"max_new_tokens": order.choice((1, 4, 15)), "stop_token_ids": []}
            asked.append((prompt, chosen))
            handles.append(scheduler.submit(prompt, **chosen))
            ended = [one for one in handles if one.finish_reason == "length"]
            if ended and order.random() < 0.5:  # the next turn of a conversation
                before = handles.index(order.choice(ended))
                texts.append([*asked[before][0], *handles[before].tokens, *[9] * 20])
        if handles and order.random() < 0.1:
            order.choice(handles).cancel()
        scheduler.step()
        assert scheduler.prefix_cache_bytes <= scheduler.limits.prefix_cache_bytes
    for handle, (prompt, chosen) in zip(handles, asked, strict=True):
        expected, found = engine.generate(prompt, **chosen), handle.result()
        if found.finish_reason == "cancelled":
            assert found.tokens == expected.tokens[: len(found.tokens)]
        else:
            assert found.tokens == expected.tokens
            if chosen.get("mode") != "lossless":  # which drafts less beside others
                assert found.stats.exit_layer == expected.stats.exit_layer
    reused = sum(handle.cached_tokens for handle in handles)
    assert reused > (0 if blocks < 1000 else 300)


def test_what_is_reused(engine: Engine) -> None:
    scheduler = scheduler_of(engine, 100)
    one_more = int(engine.manifest.kv_cache_strategy == "propagate")  # a step over one token could exit
    first = run(scheduler, PROMPT, **FULL)
    assert first == (engine.generate(PROMPT, **FULL).tokens, 0)
    assert run(scheduler, PROMPT, **FULL) == (first[0], 64), "whole blocks"
    assert run(scheduler, PROMPT[:48], **FULL)[1] == 47 - one_more, "the last token is run: it gives the logits"
    assert run(scheduler, PROMPT[:40], **FULL)[1] == 32, "of a prompt that another one begins with"
    assert run(scheduler, [*PROMPT[:40], 1, 1, 1], **FULL)[1] == 32, "of one that goes on otherwise"
    assert run(scheduler, [1, *PROMPT], **FULL)[1] == 0
    assert run(scheduler, PROMPT[:1], **FULL)[1] == 0


def test_answers_are_cached_but_not_where_kv_are_propagated(engine: Engine) -> None:
    scheduler, options = scheduler_of(engine, 100), FULL | {"max_new_tokens": 30}
    answer, _ = run(scheduler, PROMPT, **options)
    _, cached = run(scheduler, [*PROMPT, *answer, 5], **FULL)
    assert cached == (96 if engine.manifest.kv_cache_strategy == "exact" else 64)


def test_statistics_count_what_was_run(engine: Engine) -> None:
    scheduler = scheduler_of(engine, 100)
    run(scheduler, PROMPT, **FULL)
    handle = scheduler.submit(PROMPT, **FULL)
    stats = handle.result().stats
    layers = engine.manifest.model.num_layers
    ran = len(PROMPT) - 64 + FULL["max_new_tokens"] - 1
    assert (stats.prompt_tokens, handle.cached_tokens) == (len(PROMPT), 64)
    assert stats.layer_tokens_run == stats.layer_tokens_total == ran * layers


def test_a_request_uses_a_prompt_that_was_read_while_it_waited(engine: Engine) -> None:
    scheduler = scheduler_of(engine, 100, prompt_tokens=len(PROMPT))
    first, second = (scheduler.submit(PROMPT, **FULL) for _ in range(2))
    scheduler.step()
    assert scheduler.running == 2
    scheduler.step()
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
    assert first.result().tokens == second.result().tokens


def test_the_least_recently_used_text_is_dropped(engine: Engine) -> None:
    scheduler = scheduler_of(engine, 4)
    first, second, third = ([number] * 34 for number in (5, 6, 7))  # of two blocks each
    cached = [run(scheduler, text, **FULL)[1] for text in (first, second, first, third, first, third, second)]
    assert cached == [0, 0, 32, 0, 32, 32, 0]
    assert scheduler.prefix_cache_bytes == scheduler.limits.prefix_cache_bytes
    long = [8] * 150
    assert [run(scheduler, long, **FULL)[1] for _ in range(2)] == [0, 64], "of a text that is too long, the beginning"


def test_a_request_that_fails_leaves_nothing(engine: Engine) -> None:
    scheduler = scheduler_of(engine, 100)
    with pytest.raises(GenerationError, match="division by zero"):
        run(scheduler, PROMPT, logits_processor=lambda ids, logits: 1 / 0, **FULL)
    assert scheduler.prefix_cache_bytes == 0
    assert run(scheduler, PROMPT, **FULL) == (engine.generate(PROMPT, **FULL).tokens, 0)


def test_what_cannot_be_cached_is_refused(tiny_llama: TinyLlama) -> None:
    with pytest.raises(GenerationError, match="prefix_cache_bytes is for provider 'cpu'"):
        scheduler_of(tiny_llama.networks(), 1)
    graph = tiny_llama.graph(tiny_llama.exact)
    with pytest.raises(GenerationError, match="prefix_cache_bytes is 100, and the K/V of 16 tokens have"):
        graph.scheduler(SchedulerLimits(prefix_cache_bytes=100))
    with pytest.raises(GenerationError, match="prefix_cache_bytes"):
        SchedulerLimits(prefix_cache_bytes=-1)
