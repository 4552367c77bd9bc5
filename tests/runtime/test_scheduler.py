"""Requests that join, leave and are cancelled at random: each gets the tokens that it gets alone, on every engine."""

import asyncio
import math
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from caller_networks import CallersNetworks, Run, callers_engine
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting
from tide_export.bundle.opened import open_bundle
from tide_export.errors import GenerationError, QueueFullError
from tide_export.names import segment_networks as names
from tide_export.names.networks import HEAD, segment_name
from tide_export.runtime.engine import Engine
from tide_export.runtime.generation import Generation
from tide_export.runtime.handle import RequestHandle
from tide_export.runtime.native import call, library
from tide_export.runtime.scheduler import Scheduler, SchedulerLimits
from tide_export.verify.export_gate import dividing_thresholds

SLOTS = 3
LENGTHS = (1, 2, 5, 17, 41)


@pytest.fixture(scope="module")
def mixed(tiny_llama: TinyLlama) -> list[float]:
    return dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)


@pytest.fixture(scope="module", params=["graph", "networks"])
def engine(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.networks() if request.param == "networks" else tiny_llama.graph(tiny_llama.exact)


@pytest.fixture(scope="module")
def graph(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


def requests_of(engine: Engine, mixed: list[float], count: int, seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts with options of every mode, drawn at random."""
    order, exits = random.Random(seed), {"mode": "exit", "threshold": mixed, "min_layers": 0}
    options = [{"mode": "full"}, exits, exits | {"threshold": 0.3}, {"mode": "full", "temperature": 0.8, "seed": 3}]
    options.append(exits | {"temperature": 1.0, "seed": 5, "top_k": 20, "min_p": 0.01, "presence_penalty": 1.0})
    changed = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}, "logprobs": 1}
    lossless = {"mode": "lossless", "threshold": mixed}
    options += [exits | {"max_pending": 1}, lossless, lossless | {"temperature": 0.8, "seed": 3} | changed]
    return [
        (
            [order.randrange(engine.manifest.model.vocab_size) for _ in range(order.choice(LENGTHS))],
            order.choice(options) | {"max_new_tokens": order.choice((1, 4, 15)), "stop_token_ids": []},
        )
        for _ in range(count)
    ]


def facts(one: Generation) -> tuple:
    return one.tokens, one.stats.exit_layer, one.finish_reason


def test_requests_that_come_and_go_get_their_own_tokens(engine: Engine, mixed: list[float]) -> None:
    requests, order = requests_of(engine, mixed, 40, seed=1), random.Random(2)
    alone = [engine.generate(prompt, **options) for prompt, options in requests]
    scheduler = engine.scheduler(SchedulerLimits(slots=SLOTS, prompt_tokens=7))
    waiting, handles = list(requests), []
    while waiting or scheduler.running or scheduler.waiting:
        for prompt, options in waiting[: order.randrange(3)]:
            handles.append(scheduler.submit(prompt, **options))
            waiting.pop(0)
        if handles and order.random() < 0.1:
            order.choice(handles).cancel()
        scheduler.step()
        assert scheduler.running <= SLOTS
    cancelled = [handle.finish_reason == "cancelled" for handle in handles]
    assert 0 < sum(cancelled) < len(requests) / 2
    for handle, expected, ended in zip(handles, alone, cancelled, strict=True):
        found = handle.result()
        if ended:
            assert found.tokens == handle.tokens == expected.tokens[: len(found.tokens)]
        else:
            assert facts(found) == facts(expected)


def test_a_cancelled_request_frees_its_slot_before_the_next_step(graph: Engine) -> None:
    scheduler = graph.scheduler(SchedulerLimits(slots=1))
    first, second, third = (scheduler.submit([5], max_new_tokens=50, stop_token_ids=[]) for _ in range(3))
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (1, 2)
    first.cancel()
    third.cancel()  # still in the queue
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (1, 0)
    assert (first.result().finish_reason, len(first.tokens)) == ("cancelled", 1)
    assert third.result().tokens == []
    assert len(second.result().tokens) == 50
    second.cancel()
    assert second.finish_reason == "length", "after its end it stays what it was"


def test_a_request_ends_at_its_timeout(graph: Engine) -> None:
    scheduler = graph.scheduler(SchedulerLimits(slots=1))
    late = scheduler.submit([5], max_new_tokens=50, timeout=0.0)
    fine = scheduler.submit([5], max_new_tokens=3, stop_token_ids=[], timeout=600.0)
    assert late.result().finish_reason == "timeout"
    assert fine.result().finish_reason == "length"


def test_queue_and_memory_are_bounded(graph: Engine) -> None:
    scheduler = graph.scheduler(SchedulerLimits(slots=SLOTS, waiting=2, kv_tokens=30))
    options = {"max_new_tokens": 10, "stop_token_ids": []}
    with pytest.raises(GenerationError, match="have 31 tokens, and the scheduler has K/V memory for 30"):
        scheduler.submit([5] * 21, **options)
    handles = [scheduler.submit([5] * 5, **options) for _ in range(SLOTS + 2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting already: submit again later"):
        scheduler.submit([5], **options)
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (2, 3), "a third would need 45 tokens of memory"
    assert [handle.result().finish_reason for handle in handles] == ["length"] * len(handles)


def test_what_is_wrong_is_refused_at_once(graph: Engine) -> None:
    scheduler = graph.scheduler(SchedulerLimits(slots=SLOTS))
    for ids, options, reason in [
        ([], {}, "the prompt is empty"),
        ([5], {"top_k": 3}, "top_k is for a temperature above 0"),
        ([5], {"compaction_threshold": 0.5}, "compaction_threshold is for a list of prompts"),
        ([5], {"seed": [1, 2]}, "seed"),
        ([5], {"timeout": "soon"}, "timeout"),
    ]:
        with pytest.raises(GenerationError, match=reason):
            scheduler.submit(ids, **options)
    assert scheduler.waiting == 0


@pytest.mark.parametrize("limits", [{"slots": 0}, {"prompt_tokens": 0}, {"waiting": 0}, {"kv_tokens": 1.5}])
def test_limits_that_let_nothing_through_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(GenerationError, match=next(iter(limits))):
        SchedulerLimits(**limits)


def test_a_prompt_is_divided_at_the_smallest_limit(engine: Engine) -> None:
    scheduler = engine.scheduler(SchedulerLimits(slots=SLOTS, prompt_tokens=1))
    options = {"mode": "full", "max_new_tokens": 2, "stop_token_ids": []}
    prompts = [list(range(size)) for size in range(1, 12)]
    handles = [scheduler.submit(prompt, **options) for prompt in prompts]
    assert [one.result().tokens for one in handles] == [engine.generate(p, **options).tokens for p in prompts]


@pytest.mark.parametrize(("size", "steps"), [(10, 1), (20, 2), (21, 3)])
def test_a_prompt_is_read_in_parts_beside_those_that_write(engine: Engine, size: int, steps: int) -> None:
    scheduler = engine.scheduler(SchedulerLimits(slots=SLOTS, prompt_tokens=10))
    options = {"mode": "full", "max_new_tokens": 6, "stop_token_ids": []}
    writes = scheduler.submit([5, 6], **options)
    scheduler.step()
    reads = scheduler.submit(list(range(size)), **options)
    for step in range(1, 6):
        scheduler.step()
        assert (len(writes.tokens), len(reads.tokens)) == (1 + step, max(0, step - steps + 1))
    assert reads.result().tokens == engine.generate(list(range(size)), **options).tokens


def test_a_thread_does_the_steps_for_many_readers(graph: Engine, mixed: list[float]) -> None:
    requests = requests_of(graph, mixed, 24, seed=4)
    alone = [graph.generate(prompt, **options) for prompt, options in requests]
    found = dict[int, list[int]]()
    with graph.scheduler(SchedulerLimits(slots=SLOTS)) as scheduler:

        def read(number: int) -> None:
            prompt, options = requests[number]
            found[number] = list(scheduler.submit(prompt, **options))

        readers = [threading.Thread(target=read, args=(number,)) for number in range(len(requests))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert [found[number] for number in range(len(requests))] == [one.tokens for one in alone]


@pytest.mark.parametrize("seconds", [math.inf, 1e300])
def test_a_wait_for_ever_lasts_until_there_is_a_token(graph: Engine, seconds: float) -> None:
    handle = graph.scheduler().submit([5, 1, 7], mode="full", max_new_tokens=2)
    waiting = threading.Thread(target=library().tide_request_wait, args=(handle._handle, 0, seconds))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    handle.result()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_queued_request_that_expires_is_news(graph: Engine) -> None:
    async def read(handle: RequestHandle) -> list[int]:
        return [token async for token in handle]

    async def expire() -> str | None:
        with graph.scheduler(SchedulerLimits(slots=1)) as scheduler:
            late = scheduler.submit([5], max_new_tokens=2, timeout=0.0)
            assert await asyncio.wait_for(read(late), 20) == []
            return late.result().finish_reason

    assert asyncio.run(expire()) == "timeout"


def test_async_for(graph: Engine, mixed: list[float]) -> None:
    requests = requests_of(graph, mixed, 12, seed=5)
    alone = [graph.generate(prompt, **options) for prompt, options in requests]

    async def all_of(scheduler: Scheduler) -> list[list[int]]:
        async def read(prompt: list[int], options: dict[str, Any]) -> list[int]:
            return [token async for token in scheduler.submit(prompt, **options)]

        return await asyncio.gather(*[read(*one) for one in requests])

    with graph.scheduler(SchedulerLimits(slots=SLOTS)) as scheduler:
        assert asyncio.run(all_of(scheduler)) == [one.tokens for one in alone]


def test_an_event_loop_that_ends_before_its_request_harms_nobody(graph: Engine) -> None:
    ended = threading.Event()

    def process(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        assert len(ids) == 1 or ended.wait(10), "the second token comes after the loop's end"
        return logits

    async def begin(scheduler: Scheduler) -> tuple[RequestHandle, int]:
        handle = scheduler.submit([5], max_new_tokens=4, stop_token_ids=[], logits_processor=process)
        return handle, await anext(handle)

    with graph.scheduler(SchedulerLimits(slots=SLOTS)) as scheduler:
        handle, first = asyncio.run(begin(scheduler))
        ended.set()
        assert [first, *handle] == graph.generate([5], max_new_tokens=4, stop_token_ids=[]).tokens


def test_a_request_that_ends_before_the_loop_watches_is_noticed(graph: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(scheduler: Scheduler) -> list[int]:
        handle = scheduler.submit([5], max_new_tokens=4, stop_token_ids=[])
        return [token async for token in handle]

    with graph.scheduler(SchedulerLimits(slots=SLOTS)) as scheduler:

        def late(name: str, *arguments: object) -> None:
            while scheduler.running or scheduler.waiting:
                time.sleep(0.01)
            call(name, *arguments)

        monkeypatch.setattr("tide_export.runtime.watch.call", late)
        tokens = asyncio.run(asyncio.wait_for(ask(scheduler), 10))
    assert tokens == graph.generate([5], max_new_tokens=4, stop_token_ids=[]).tokens


@pytest.mark.parametrize("drain", [True, False])
def test_close(graph: Engine, drain: bool) -> None:
    scheduler = graph.scheduler(SchedulerLimits(slots=1)).start()
    handles = [scheduler.submit([5], max_new_tokens=40, stop_token_ids=[]) for _ in range(4)]
    scheduler.close(drain=drain)
    reasons = [handle.result().finish_reason for handle in handles]
    assert reasons == ["length"] * 4 if drain else reasons[-1] == "cancelled"
    with pytest.raises(GenerationError, match="the scheduler is closed"):
        scheduler.submit([5])


@pytest.fixture
def callers(tiny_llama: TinyLlama) -> tuple[Engine, CallersNetworks]:
    return callers_engine(open_bundle(tiny_llama.exact))


def test_a_request_that_fails_fails_alone(callers: tuple[Engine, CallersNetworks]) -> None:
    (engine, networks), bad = callers, 77
    options = {"mode": "full", "max_new_tokens": 8, "stop_token_ids": []}
    alone = [engine.generate(prompt, **options) for prompt in ([5], [6, 7])]

    def failing(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
        if bad in tensors.get(names.INPUT_IDS, ()):
            raise GenerationError("no memory for this one")

    networks.after = failing
    scheduler = engine.scheduler(SchedulerLimits(slots=SLOTS))
    one, wrong, other = (scheduler.submit(prompt, **options) for prompt in ([5], [bad], [6, 7]))
    with pytest.raises(GenerationError, match="no memory for this one"):
        wrong.result()
    assert [facts(one.result()), facts(other.result())] == list(map(facts, alone))
    assert scheduler.running == 0


def test_logits_that_are_not_finite_end_one_request(callers: tuple[Engine, CallersNetworks]) -> None:
    engine, networks = callers

    def broken(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
        if run[0] == HEAD and len(tensors[names.ROWS]) == 2:
            tensors[names.LOGITS][1:] = np.nan

    networks.after = broken
    scheduler = engine.scheduler(SchedulerLimits(slots=2))
    fine, wrong = (scheduler.submit([5], max_new_tokens=3, mode="full", stop_token_ids=[]) for _ in range(2))
    assert len(fine.result().tokens) == 3
    with pytest.raises(GenerationError, match="not finite"):
        list(wrong)


def test_coming_along_saves_runs(callers: tuple[Engine, CallersNetworks], mixed: list[float]) -> None:
    """What it is for: the last segment reads its weights once for all who have drafts to verify."""
    (engine, networks), last = callers, segment_name(2)
    engine = engine.drafting_as(Drafting((0.0, 0.0), 6, 0, (0.05, 0.1), DEFAULT_VERIFY_COSTS))
    options = {"mode": "lossless", "threshold": mixed, "prompt_lookup": 0, "max_new_tokens": 30, "stop_token_ids": []}
    deep, tokens = dict[float | None, int](), list[list[list[int]]]()
    for share in (None, 1.0):
        networks.runs.clear()
        made = engine.generate([TEXT[:5], TEXT[7:11], TEXT[20:22]], compaction_threshold=share, **options)
        deep[share] = sum(name == last for name, *_ in networks.runs)
        tokens.append([one.tokens for one in made])
    assert deep[None] < deep[1.0]
    assert tokens[0] == tokens[1]


def test_a_signal_ends_a_list_between_two_steps(
    callers: tuple[Engine, CallersNetworks], request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    engine, networks = callers

    raised: list[Run] = []

    def interrupted(run: Run) -> None:
        if len(networks.runs) == 5 and not raised:
            raised.append(run)
            signal.raise_signal(signal.SIGINT)

    networks.before = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5], [6]], max_new_tokens=50, mode="full", stop_token_ids=[])
    assert len(networks.runs) < 20, "50 steps have 250"
