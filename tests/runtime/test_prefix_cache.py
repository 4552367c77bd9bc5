"""K/V and recurrent states that requests share: the tokens are those without a cache, the memory is bounded, the
statistics are right."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiers
from families import build
from judge import TEXT
from tiny_configs import CHECKPOINTS
from tiny_engines import TinyLlama, engine_of

from tide_export.errors import GenerationError
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import Scheduler, SchedulerLimits
from tide_export.verify.export_gate import dividing_thresholds

BLOCK_TOKENS = 16
TOKEN_BYTES = 200  # of the tokens of a block, at most: what one without K/V takes
SLOTS = 3
PROMPT = [token % 97 + 3 for token in range(70)]
FULL: dict[str, Any] = {"mode": "full", "max_new_tokens": 4, "stop_token_ids": []}


HYBRIDS = ["qwen3_5 (text)", "lfm2", "mamba"]  # which can take back 32, 32 and 8 tokens; the last has no K/V
USUAL = ["exact", "qwen3_5 (text)", "mamba"]
of_hybrids = pytest.mark.parametrize("made", tiers.exhaustive_but(USUAL[1:], HYBRIDS), indirect=True, scope="module")


class Made(NamedTuple):
    """An engine, and thresholds that some tokens exceed."""

    engine: Engine
    mixed: list[float]


def made_of(kind: str, tiny_llama: TinyLlama, folder: Path) -> Made:
    if kind not in HYBRIDS:
        mixed = dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)
        return Made(tiny_llama.graph(tiny_llama.exact), mixed)
    source = build(kind)
    routers = random_routers(source, CHECKPOINTS, TEXT, bottleneck=16)
    return Made(engine_of(source, routers, folder), dividing_thresholds(source, routers, TEXT))


@pytest.fixture(scope="module", params=tiers.exhaustive_but(USUAL, ["exact", *HYBRIDS]))
def made(request: pytest.FixtureRequest, tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_of(request.param, tiny_llama, tmp_path_factory.mktemp("prefixes") / "bundle")


@pytest.fixture(scope="module")
def engine(made: Made) -> Engine:
    return made.engine


@pytest.fixture(scope="module")
def mixed(made: Made) -> list[float]:
    return made.mixed


def sizes_of(engine: Engine, blocks: int, states: int) -> tuple[int, int]:
    """The bytes of the K/V of so many blocks, and of so many recurrent states."""
    block = BLOCK_TOKENS * engine.manifest.kv_token_bytes or TOKEN_BYTES
    return blocks * block, states * engine.manifest.model.state_bytes


def scheduler_of(engine: Engine, blocks: int, **limits: Any) -> Scheduler:
    """A scheduler whose cache has room for so many blocks, each with recurrent states if the model keeps any."""
    size = sum(sizes_of(engine, blocks, blocks))
    return engine.scheduler(SchedulerLimits(**({"slots": SLOTS} | limits), prefix_cache_bytes=size))


def run(scheduler: Scheduler, ids: list[int], **options: Any) -> tuple[list[int], int]:
    """The tokens after a prompt, and how many of its tokens were cached."""
    handle = scheduler.submit(ids, **options)
    return handle.result().tokens, handle.cached_tokens


def options_of(engine: Engine, mixed: list[float]) -> list[dict[str, Any]]:
    exits: dict[str, Any] = {"mode": "exit", "threshold": mixed, "min_layers": 0}
    options = [{"mode": "full"}, exits, {"mode": "full", "temperature": 0.8, "seed": 3}, exits | {"threshold": 0.3}]
    options.append(exits | {"temperature": 1.0, "seed": 5, "top_k": 20})
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
    first = run(scheduler, PROMPT, **FULL)
    assert first == (engine.generate(PROMPT, **FULL).tokens, 0)
    assert run(scheduler, PROMPT, **FULL) == (first[0], 64), "whole blocks"
    if engine.manifest.model.states:  # known after 64 tokens alone, until a prompt ends or leaves the text elsewhere
        assert [run(scheduler, PROMPT[:48], **FULL)[1] for _ in range(2)] == [0, 32]
        assert [run(scheduler, [*PROMPT[:20], number, 1], **FULL)[1] for number in (1, 2)] == [0, 16]
    else:
        assert run(scheduler, PROMPT[:48], **FULL)[1] == 47, "the last token is run: it gives the logits"
    assert run(scheduler, PROMPT[:40], **FULL)[1] == 32, "of a prompt that another one begins with"
    assert run(scheduler, [*PROMPT[:40], 1, 1, 1], **FULL)[1] == 32, "of one that goes on otherwise"
    assert run(scheduler, [1, *PROMPT], **FULL)[1] == 0
    assert run(scheduler, PROMPT[:1], **FULL)[1] == 0


def test_answers_are_cached(engine: Engine, mixed: list[float]) -> None:
    exits = {"threshold": mixed, "min_layers": 0}
    modes: list[dict[str, Any]] = [{"mode": "full"}, {"mode": "exit", **exits}]
    modes += [{"mode": "lossless", **exits}, {"mode": "exit", "threshold": 0.0, "min_layers": 0, "max_pending": 20}]
    for options in modes:
        scheduler, options = scheduler_of(engine, 100), FULL | options | {"max_new_tokens": 30}
        answer, _ = run(scheduler, PROMPT, **options)
        again = [*PROMPT, *answer, 5]
        found, cached = run(scheduler, again, **options)
        assert found == engine.generate(again, **options).tokens
        least = 96 if options["mode"] != "exit" else 80 if options["threshold"] else 64  # what is pending is not cached
        assert cached in range(least, 97, 16)


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
    states = engine.manifest.model.state_bytes  # of a text's last block alone
    scheduler = scheduler_of(engine, 3 if states else 4)
    first, second, third = ([number] * 34 for number in (5, 6, 7))  # of two blocks each
    cached = [run(scheduler, text, **FULL)[1] for text in (first, second, first, third, first, third, second)]
    assert cached == [0, 0, 32, 0, 32, 32, 0]
    assert states or scheduler.prefix_cache_bytes == scheduler.limits.prefix_cache_bytes
    long = [8] * 150
    cached = [run(scheduler, long, **FULL)[1] for _ in range(2)]
    assert cached == [0, 144 if states else 64], "of a text that is too long, the beginning"


def test_a_request_that_reads_all_of_its_prompt_leaves_it_to_others(engine: Engine) -> None:
    scheduler = scheduler_of(engine, 100, prompt_tokens=24)
    expected = engine.generate(PROMPT, prompt_logprobs=1, **FULL)
    handles = [scheduler.submit(PROMPT, prompt_logprobs=1, **FULL) for _ in range(2)]
    for handle in handles:
        assert (handle.result().tokens, handle.cached_tokens) == (expected.tokens, 0)
    assert run(scheduler, PROMPT, **FULL) == (expected.tokens, 64)


@of_hybrids
def test_of_a_conversation_the_states_of_old_turns_are_dropped_first(engine: Engine) -> None:
    scheduler = engine.scheduler(SchedulerLimits(slots=1, prefix_cache_bytes=sum(sizes_of(engine, 20, 4))))
    other, text, reused = [9] * 20, PROMPT[:40], list[int]()
    options = FULL | {"max_new_tokens": 40}
    for turn in range(5):
        assert run(scheduler, other, **FULL)[1] == (16 if turn else 0), "it is used each turn"
        answer, cached = run(scheduler, text, **options)
        assert answer == engine.generate(text, **options).tokens
        reused.append(cached)
        text = [*text, *answer, turn, turn]
    assert reused == [0, 64, 112, 160, 192], "up to the last page that was full"


@of_hybrids
def test_a_text_that_has_no_room_drops_no_other(engine: Engine) -> None:
    scheduler = engine.scheduler(SchedulerLimits(slots=1, prefix_cache_bytes=sum(sizes_of(engine, 3, 1))))
    cached = [run(scheduler, text, **FULL)[1] for text in (PROMPT[:20], [8] * 80, [8] * 80, PROMPT[:20])]
    assert cached == [0, 0, 0, 16]


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


@of_hybrids
def test_states_without_room_are_refused(engine: Engine) -> None:
    with pytest.raises(GenerationError, match="the K/V of 16 tokens with the recurrent states after them have"):
        engine.scheduler(SchedulerLimits(prefix_cache_bytes=sum(sizes_of(engine, 1, 1)) - TOKEN_BYTES))
    with pytest.raises(GenerationError, match="and the memory for K/V holds"):
        engine.scheduler(SchedulerLimits(prefix_cache_bytes=2**60))


def test_prompts_are_shared_with_the_same_salt_alone(engine: Engine) -> None:
    scheduler = scheduler_of(engine, 40)
    seen = [
        run(scheduler, PROMPT, **FULL | ({} if salt is None else {"cache_salt": salt}))
        for salt in (None, "a", "b", "a", None, "b")
    ]
    assert len({tuple(tokens) for tokens, _ in seen}) == 1
    assert [count > 0 for _, count in seen] == [False, False, False, True, True, True]
