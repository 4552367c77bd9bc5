"""Functions of the caller that a step calls: they raise, block, return nonsense, use the engine, and are kept."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from caller_networks import callers_engine
from tiny_engines import TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.errors import ConstraintError, GenerationError, TideError
from tide_export.runtime import native
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import Scheduler, SchedulerLimits

PROMPT = [5, 17, 3]
GREEDY: dict[str, Any] = {"mode": "full", "max_new_tokens": 6, "stop_token_ids": []}
WAYS = ("alone", "list", "steps by the reader", "steps by a thread")
SECONDS = 20  # after which a test hangs


@pytest.fixture(scope="module")
def engine(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


@pytest.fixture
def threaded(engine: Engine) -> Iterator[Scheduler]:
    with engine.scheduler(SchedulerLimits(slots=4)) as scheduler:
        yield scheduler


def generated(engine: Engine, way: str, **options: Any) -> list[int]:
    """The tokens of PROMPT, by any of the ways there are; the requests besides it must end as they always do."""
    expected = engine.generate([6, 7], **GREEDY).tokens
    if way == "alone":
        return engine.generate(PROMPT, **options).tokens
    if way == "list":
        return engine.generate([PROMPT, PROMPT], **options)[0].tokens
    scheduler = engine.scheduler(SchedulerLimits(slots=4))
    if way == "steps by a thread":
        scheduler.start()
    other, one = scheduler.submit([6, 7], **GREEDY), scheduler.submit(PROMPT, **options)
    try:
        return one.result().tokens
    finally:
        assert other.result().tokens == expected
        scheduler.close()
        assert (scheduler.waiting, scheduler.running) == (0, 0)


class Odd(BaseException):
    """Neither an error nor of a signal."""


def unlikely(ids: list[int], logits: np.ndarray) -> np.ndarray:
    logits[ids[-1]] -= 5
    return logits


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (lambda ids, logits: 1 / 0, "logits_processor failed: division by zero$"),
    "of another length": (lambda ids, logits: logits[:3], r"must return logits of shape \[512\], not \[3\]"),
    "of another shape": (lambda ids, logits: logits[None], r"must return logits of shape \[512\], not \[1, 512\]"),
    "None": (lambda ids, logits: None, r"must return logits of shape \[512\], not \[\]"),
    "text": (lambda ids, logits: "x", "logits_processor failed: could not convert"),
    "ragged": (lambda ids, logits: [[1], [1, 2]], "logits_processor failed: setting an array element"),
    "NaN": (lambda ids, logits: logits * np.nan, "makes the logit of token 0 nan: give"),
    "one NaN": (lambda ids, logits: np.where(np.arange(512) == 9, np.nan, logits), "makes the logit of token 9 nan"),
    "nothing left": (lambda ids, logits: logits - np.inf, "leave no token with a finite logit"),
    "infinity": (lambda ids, logits: logits + np.inf, "makes the logit of token 0 inf: give"),
    "too few arguments": (lambda ids: ids, "logits_processor failed: .* takes 1 positional argument but 2 were given"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_fails_is_one_sentence(engine: Engine, name: str, way: str) -> None:
    hook, sentence = HOOKS[name]
    with pytest.raises(GenerationError, match=sentence) as error:
        generated(engine, way, logits_processor=hook, **GREEDY)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ConstraintError) == ("finite" in sentence or "makes the logit" in sentence)
    assert generated(engine, way, **GREEDY) == engine.generate(PROMPT, **GREEDY).tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [Odd, SystemExit, KeyboardInterrupt, StopIteration, MemoryError])
def test_what_a_hook_raises_is_had_by_who_reads(engine: Engine, error: type[BaseException], way: str) -> None:
    def hook(ids: list[int], logits: np.ndarray) -> np.ndarray:
        if len(ids) == 5:
            raise error("no rule fits")
        return logits

    expected = GenerationError if issubclass(error, Exception) else error
    with pytest.raises(expected, match="no rule fits") as caught:
        generated(engine, way, logits_processor=hook, **GREEDY)
    assert expected is error or type(caught.value.__cause__) is error
    assert generated(engine, way, **GREEDY) == engine.generate(PROMPT, **GREEDY).tokens


def test_threads_have_their_own_failures(engine: Engine) -> None:
    """What a hook in one thread raises is no other thread's."""
    gate, found = threading.Barrier(2), dict[str, BaseException]()

    def work(name: str, error: BaseException) -> None:
        def hook(ids: list[int], logits: np.ndarray) -> np.ndarray:
            gate.wait(SECONDS)
            raise error

        try:
            engine.generate(PROMPT, logits_processor=hook, **GREEDY)
        except BaseException as caught:
            found[name] = caught

    given = {"odd": Odd(), "tide": TideError("a rule")}
    workers = [threading.Thread(target=work, args=one) for one in given.items()]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
    assert found == given


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_other_types_are_logits(engine: Engine, way: str) -> None:
    expected = engine.generate(PROMPT, logits_processor=unlikely, **GREEDY).tokens
    assert expected != engine.generate(PROMPT, **GREEDY).tokens
    for made in (np.float64, np.float32, np.ndarray.tolist):
        found = generated(engine, way, logits_processor=lambda ids, x, made=made: made(unlikely(ids, x)), **GREEDY)
        assert found == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_uses_the_engine(engine: Engine, way: str) -> None:
    """Alone, for a list, with a hook of its own, and by a scheduler of its own."""
    calls = list[int]()

    def hook(ids: list[int], logits: np.ndarray) -> np.ndarray:
        calls.append(len(ids))
        inner = engine.generate([ids[-1]], logits_processor=unlikely, mode="full", max_new_tokens=2).tokens
        assert engine.generate([[ids[-1]], [3]], mode="full", max_new_tokens=2)[0].tokens
        scheduler = engine.scheduler(SchedulerLimits(slots=1))
        request = scheduler.submit([ids[-1]], logits_processor=unlikely, mode="full", max_new_tokens=2)
        assert request.result().tokens == inner
        return unlikely(ids, logits)

    expected = engine.generate(PROMPT, logits_processor=unlikely, **GREEDY).tokens
    assert generated(engine, way, logits_processor=hook, **GREEDY) == expected
    assert set(calls) == set(range(3, 9))


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("call", ["result", "step", "close"])
def test_a_hook_cannot_wait_for_its_own_scheduler(engine: Engine, threads: bool, call: str) -> None:
    scheduler = engine.scheduler(SchedulerLimits(slots=2))
    other = scheduler.submit([6, 7], **GREEDY | {"max_new_tokens": 60})

    def hook(ids: list[int], logits: np.ndarray) -> np.ndarray:
        assert scheduler.running == 2
        assert len(other.tokens) < 60, "what does not wait it may ask"
        getattr(other if call == "result" else scheduler, call)()
        return logits

    waiting = scheduler.submit(PROMPT, logits_processor=hook, **GREEDY)
    if threads:
        scheduler.start()
    with pytest.raises(GenerationError, match="a hook of a request cannot wait for the scheduler that calls it"):
        waiting.result()
    assert other.result().finish_reason == "length"
    scheduler.close()


def test_a_hook_that_blocks_blocks_its_steps_alone(engine: Engine, threaded: Scheduler) -> None:
    entered, go = threading.Event(), threading.Event()

    def hook(ids: list[int], logits: np.ndarray) -> np.ndarray:
        entered.set()
        assert go.wait(SECONDS)
        return logits

    blocked = threaded.submit(PROMPT, logits_processor=hook, **GREEDY)
    assert entered.wait(SECONDS)
    later, cancelled = (threaded.submit([6, 7], **GREEDY) for _ in range(2))
    cancelled.cancel()
    assert (threaded.running, threaded.waiting) == (1, 2)
    assert (blocked.tokens, later.tokens, later.text, later.finish_reason) == ([], [], None, None)
    assert engine.generate(PROMPT, **GREEDY).tokens, "the engine goes on beside it"
    assert engine.scheduler().submit(PROMPT, **GREEDY).result().tokens
    go.set()
    assert blocked.result().tokens == engine.generate(PROMPT, **GREEDY).tokens
    assert later.result().finish_reason == "length"
    assert cancelled.result().tokens == []


def test_a_hook_lives_as_long_as_its_request(threaded: Scheduler) -> None:
    """Whose handle nobody keeps: functions that come later would take the memory of the freed ones."""
    entered, go, calls = threading.Event(), threading.Event(), list[int]()

    def hook(ids: list[int], logits: np.ndarray) -> np.ndarray:
        calls.append(len(ids))
        entered.set()
        assert go.wait(SECONDS)
        return logits

    threaded.submit(PROMPT, logits_processor=hook, **GREEDY)
    assert entered.wait(SECONDS)
    gc.collect(0)  # the youngest objects, and below young ones: all take seconds in a process of many tests
    others = [native.ProcessLogits(lambda *_: calls.append(-1) or native.GENERATION_ERROR) for _ in range(500)]
    go.set()
    assert threaded.submit([6, 7], **GREEDY).result().tokens
    read = threaded.submit(PROMPT, logits_processor=unlikely, **GREEDY)
    assert calls == list(range(3, 9))
    assert read.result().tokens
    assert others
    ended = weakref.ref(hook)
    del hook
    gc.collect(1)
    assert ended() is None, "the hook of the request that has ended is dropped"


def test_a_stream_keeps_its_engine(tiny_llama: TinyLlama) -> None:
    """With the functions of its networks, too."""

    def started() -> tuple[Any, Any, Any]:
        engine, networks = callers_engine(open_bundle(tiny_llama.exact))
        stream, sequence = engine.stream(PROMPT, **GREEDY), engine.start([2.0, 2.0])
        return stream, sequence, networks

    stream, sequence, networks = started()
    gc.collect(1)
    others = [native.ProcessLogits(lambda *_: native.GENERATION_ERROR) for _ in range(500)]
    assert stream.finish().tokens == tiny_llama.graph(tiny_llama.exact).generate(PROMPT, **GREEDY).tokens
    assert sequence.step(PROMPT).exit_layer
    assert networks.opened == 2
    del stream, sequence
    assert networks.opened == 0
    assert others
