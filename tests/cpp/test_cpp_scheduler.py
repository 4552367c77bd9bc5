"""The schedulers of both runtimes: the same requests, with the same steps between them, have the same tokens, ends and
counts in both, step by step; and what each promises by itself."""

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from cpp_engine import CppEngine, facts, prompts_of, words
from cpp_scheduler import CppScheduler
from test_cpp_callbacks import resources
from test_cpp_memory import failures

from tide_export.errors import GenerationError, QueueFullError
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import SchedulerLimits

SLOTS, MIXED = 3, [0.5, 0.5]
LENGTHS = (1, 2, 5, 17, 41)
EXITS: dict[str, Any] = {"mode": "exit", "threshold": MIXED, "min_layers": 0}
LOSSLESS: dict[str, Any] = {"mode": "lossless", "threshold": MIXED, "max_pending": 3, "prompt_lookup": 3}
FULL: dict[str, Any] = {"mode": "full", "stop_token_ids": []}
Request = tuple[list[int], dict[str, Any]]


class Pair:
    """Engines of both runtimes on one bundle."""

    def __init__(self, python: Engine, cpp: CppEngine) -> None:
        self.python, self.cpp = python, cpp

    def schedulers(self, **limits: Any) -> list[Any]:
        chosen = SchedulerLimits(**limits)
        return [self.python.scheduler(chosen), CppScheduler(self.cpp, chosen)]


@pytest.fixture(scope="module")
def pairs(tiny_llama, open_cpp: Callable[..., CppEngine]) -> dict[str, Pair]:
    bundles = {"exact": tiny_llama.exact, "propagating": tiny_llama.propagating}
    pairs = {kind: Pair(tiny_llama.graph(bundle), open_cpp(bundle)) for kind, bundle in bundles.items()}
    return pairs | {"segments": Pair(tiny_llama.networks(), open_cpp(tiny_llama.exact, networks="host"))}


@pytest.fixture(params=["exact", "propagating", "segments"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


@pytest.fixture(params=[("exact", 0), ("exact", 1), ("segments", 1)], ids=["python", "cpp", "cpp on segments"])
def opened(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Callable[..., Any]:
    """Opens a scheduler of either runtime."""
    kind, number = request.param
    return lambda **limits: pairs[kind].schedulers(**limits)[number]


@pytest.fixture(params=["exact", "segments"])
def exact(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> CppEngine:
    return pairs[request.param].cpp


def requests_of(pair: Pair, number: int, seed: int, sampled: bool) -> list[Request]:
    """Prompts with options of every mode, drawn at random."""
    order, vocabulary = random.Random(seed), pair.python.manifest.model.vocab_size
    options = [{"mode": "full"}, EXITS, EXITS | {"threshold": [0.3, 0.9]}, EXITS | {"threshold": 0.0}]
    if pair.python.manifest.kv_cache_strategy == "exact":
        options += [EXITS | {"max_pending": 1}, EXITS | {"max_pending": 0}, LOSSLESS, LOSSLESS | {"prompt_lookup": 0}]
    if sampled:
        options = [one | {"temperature": 0.9, "top_k": 20, "seed": n} for n, one in enumerate(options)]
    drawn = list[Request]()
    for _ in range(number):
        prompt = [order.randrange(vocabulary) for _ in range(order.choice(LENGTHS))]
        stops = order.sample(range(vocabulary), vocabulary // 8) if order.random() < 0.3 else []
        chosen = order.choice(options) | {"max_new_tokens": order.choice((1, 4, 15)), "stop_token_ids": stops}
        drawn.append((prompt, chosen))
    return drawn


def replayed(scheduler: Any, requests: list[Request], seed: int) -> tuple[list[Any], list[Any]]:
    """Submits at random, and cancels some after a number of tokens; what each step did, and the handles."""
    order, waiting, handles, trace = random.Random(seed), list(requests), list[Any](), list[Any]()
    cancelled_after = [order.choice((0, 1, 3, 99, 99, 99)) for _ in requests]
    while waiting or handles[-1].finish_reason is None or scheduler.step():
        for prompt, options in waiting[: order.randrange(3)]:
            handles.append(scheduler.submit(prompt, **options))
            waiting.pop(0)
        stepped = scheduler.step()
        counts = [len(handle.tokens) for handle in handles]
        trace.append((stepped, scheduler.running, scheduler.waiting, counts))
        for tokens, handle, limit in zip(counts, handles, cancelled_after, strict=False):
            if tokens >= limit:
                handle.cancel()
    return trace, handles


def test_both_do_the_same_steps(pair: Pair) -> None:
    requests = requests_of(pair, 40, seed=1, sampled=False)
    (expected, python), (trace, cpp) = [
        replayed(one, requests, seed=2) for one in pair.schedulers(slots=SLOTS, prompt_tokens=7)
    ]
    assert trace == expected
    ended = [facts(one.result()) for one in cpp]
    assert ended == [facts(one.result()) for one in python]
    assert {reason for _, reason, _ in ended} == {"stop", "length", "cancelled"}
    for (prompt, options), (tokens, reason, _) in zip(requests, ended, strict=True):
        alone = pair.cpp.generate(prompt, **options)
        assert tokens == (alone.tokens[: len(tokens)] if reason == "cancelled" else alone.tokens)


def test_sampled_tokens_are_those_of_each_request_alone(pair: Pair) -> None:
    """The two runtimes have other random numbers."""
    requests = requests_of(pair, 24, seed=3, sampled=True)
    for engine, scheduler in zip((pair.python, pair.cpp), pair.schedulers(slots=SLOTS, prompt_tokens=9), strict=True):
        trace, handles = replayed(scheduler, requests, seed=4)
        assert len(trace) > 20
        for (prompt, options), handle in zip(requests, handles, strict=True):
            alone, generation = engine.generate(prompt, **options), handle.result()
            assert generation.tokens == alone.tokens[: len(generation.tokens)]
            assert generation.tokens == alone.tokens or generation.finish_reason == "cancelled"


def test_a_prompt_is_divided_at_the_smallest_limit(pair: Pair) -> None:
    """Where K/V are propagated a step over one last token could exit, which a prompt alone does not."""
    options = EXITS | {"threshold": 0.0, "max_new_tokens": 2, "stop_token_ids": []}
    for size in range(1, 13):
        prompts = [[(3 * i + size) % 32 for i in range(size)], [7, 8, 9], [5]]
        alone = [facts(pair.cpp.generate(prompt, **options))[:2] for prompt in prompts]
        for scheduler in pair.schedulers(slots=SLOTS, prompt_tokens=4):
            handles = [scheduler.submit(prompt, **options) for prompt in prompts]
            assert [facts(handle.result())[:2] for handle in handles] == alone


def test_queue_and_memory_are_bounded(opened: Callable[..., Any]) -> None:
    scheduler = opened(slots=SLOTS, waiting=2, kv_tokens=30)
    options = FULL | {"max_new_tokens": 10}
    with pytest.raises(GenerationError, match="have 31 tokens, and the scheduler has K/V memory for 30"):
        scheduler.submit([5] * 21, **options)
    handles = [scheduler.submit([5] * 5, **options) for _ in range(SLOTS + 2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting already: submit again later"):
        scheduler.submit([5], **options)
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (2, 3), "a third would need 45 tokens of memory"
    assert [handle.result().finish_reason for handle in handles] == ["length"] * len(handles)


def test_a_cancelled_request_frees_its_slot_before_the_next_step(opened: Callable[..., Any]) -> None:
    scheduler = opened(slots=1)
    first, second, third = (scheduler.submit([5], **FULL, max_new_tokens=20) for _ in range(3))
    scheduler.step()
    first.cancel()
    third.cancel()  # still in the queue
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (1, 0)
    assert (first.result().finish_reason, len(first.tokens)) == ("cancelled", 1)
    assert (third.result().finish_reason, third.tokens) == ("cancelled", [])
    assert len(second.result().tokens) == 20
    second.cancel()
    assert second.finish_reason == "length", "after its end it stays what it was"


def test_a_request_ends_at_its_timeout(opened: Callable[..., Any]) -> None:
    scheduler = opened(slots=1)
    timeouts = [None, 600.0, 0.0, 600.0, None, 0.0]
    handles = [scheduler.submit([5], **FULL, max_new_tokens=3, timeout=timeout) for timeout in timeouts]
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (1, 3)
    reasons = ["timeout" if timeout == 0.0 else "length" for timeout in timeouts]
    assert [handle.result().finish_reason for handle in handles] == reasons


def test_a_cancelled_request_has_all_its_text(exact: CppEngine) -> None:
    CppScheduler(exact, SchedulerLimits(slots=1))
    request = [*exact.request([5, 6], 9, **FULL), "--detokenizer", "halves"]
    number = str(exact.call("schedule_submit", "none", *request))
    for _ in range(3):
        exact.call("schedule_step")
    exact.call("schedule_cancel", number)
    assert exact.call("schedule_result", number)["text"] == "\u00e9\ufffd", "half a character at the end too"


def test_what_is_wrong_is_refused_at_once(opened: Callable[..., Any]) -> None:
    scheduler = opened(slots=SLOTS)
    for ids, options, reason in [
        ([], {}, "the prompt is empty: give at least one token"),
        ([5], {"top_k": 3}, "top_k is for a temperature above 0"),
        ([5], {"compaction_threshold": 0.5}, "compaction_threshold is for a list of prompts"),
        ([5], {"seed": [1, 2], "temperature": 1.0}, "seed must be a whole number, 0 or more"),
        ([5], {"timeout": float("nan")}, "timeout must be a number, not nan"),
    ]:
        with pytest.raises(GenerationError, match=reason):
            scheduler.submit(ids, **options)
    assert scheduler.waiting == 0


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ("0 512 none none 0", "slots must be a whole number, 1 or more, not 0"),
        ("1 3 none none 0", "prompt_tokens must be a whole number, 4 or more, not 3"),
        ("1 512 0 none 0", "waiting must be a whole number, 1 or more, not 0"),
        ("1 512 none -1 0", "kv_tokens must be a whole number, 1 or more, not -1"),
        ("1 512 none none -1", "prefix_cache_bytes must be a whole number, 0 or more, not -1"),
        ("1 512 none none 100", "prefix_cache_bytes is 100, and the K/V of 16 tokens have"),
    ],
)
def test_limits_that_let_nothing_through_are_refused(pairs: dict[str, Pair], limits: str, sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence):
        pairs["exact"].cpp.call("schedule_open", *limits.split())


@pytest.mark.parametrize("drain", [True, False])
def test_close(opened: Callable[..., Any], drain: bool) -> None:
    scheduler = opened(slots=1).start()
    handles = [scheduler.submit([5], **FULL, max_new_tokens=30) for _ in range(4)]
    scheduler.close(drain=drain)
    reasons = [handle.result().finish_reason for handle in handles]
    assert reasons == ["length"] * 4 if drain else reasons[-1] == "cancelled"
    with pytest.raises(GenerationError, match="the scheduler is closed: it takes no more requests"):
        scheduler.submit([5])


def test_handles_outlive_their_scheduler(exact: CppEngine) -> None:
    scheduler = CppScheduler(exact, SchedulerLimits(slots=1))
    done, begun, waiting = (scheduler.submit([5], **FULL, max_new_tokens=3) for _ in range(3))
    expected = done.result()
    next(begun)
    exact.call("schedule_drop")
    assert facts(done.result()) == facts(expected)
    assert [begun.result().finish_reason, waiting.result().finish_reason] == ["cancelled"] * 2
    assert (begun.tokens, waiting.tokens) == (expected.tokens[:1], [])


@pytest.mark.parametrize("threaded", [True, False])
def test_many_threads_read(pair: Pair, threaded: bool) -> None:
    """A thread does the steps, or whoever reads."""
    prompts = [[(5 * i + n) % 32 for i in range(1 + n % 7)] for n in range(18)]
    before = resources(pair.cpp)
    scheduler = CppScheduler(pair.cpp, SchedulerLimits(slots=SLOTS))
    if threaded:
        scheduler.start()
    options = EXITS | {"stop_token_ids": [], "max_new_tokens": 6}
    tokens = pair.cpp.call("schedule_readers", *prompts_of(prompts), *words(**options))
    pair.cpp.call("schedule_drop")
    assert resources(pair.cpp) == before
    for number, (prompt, found) in enumerate(zip(prompts, tokens, strict=True)):
        expected = pair.cpp.generate(prompt, **options).tokens
        assert found == expected[: len(found)]
        assert len(found) == 6 or (number % 3 == 2 and len(found) >= 2)


# --- memory that ends ------------------------------------------------------------------------------------------------

BEGUN = [([3, 14, 15], EXITS), ([9] * 20, FULL), ([2, 6], LOSSLESS), ([1, 2], FULL)]


def begun(engine: CppEngine) -> list[Any]:
    """The handles of requests that write, one that reads its prompt, and one that joins in the next step."""
    scheduler = CppScheduler(engine, SchedulerLimits(slots=4, prompt_tokens=6))
    options = {"max_new_tokens": 5, "stop_token_ids": []}
    handles = [scheduler.submit(prompt, **(chosen | options)) for prompt, chosen in BEGUN[:3]]
    for _ in range(2):
        scheduler.step()
    return [*handles, scheduler.submit(BEGUN[3][0], **(BEGUN[3][1] | options))]


@pytest.mark.parametrize("again", [0, 9, 60])
def test_a_step_without_memory_ends_no_other_request(exact: CppEngine, again: int) -> None:
    """A step that fails is repeated for each request alone. A second failure ends one of them, or two end that fail
    outside of their step."""
    expected, failed = [handle.result().tokens for handle in begun(exact)], list[int]()
    for handles, result in failures(exact, lambda: begun(exact), lambda _: exact.call("schedule_step"), again=again):
        assert result is True, "a step throws nothing"
        while exact.call("schedule_step"):
            pass
        described = [handle.described() for handle in handles]
        failed.append(sum(one["failed"] for one in described))
        for handle, one, tokens in zip(handles, described, expected, strict=True):
            assert one["tokens"] == (tokens[: len(one["tokens"])] if one["failed"] else tokens)
            if one["failed"]:
                with pytest.raises((GenerationError, RuntimeError), match=r"not enough memory|injected|bad_alloc"):
                    handle.result()
        assert exact.call("schedule_counts")["running"] == 0
    assert len(failed) > 40
    ends = {0, 1} if again == 0 else {1, 2}
    assert ends.issuperset(failed)
    assert failed.count(min(ends)) > len(failed) / 2


def test_a_request_without_memory_is_not_in_the_queue(exact: CppEngine) -> None:
    scheduler, expected = CppScheduler(exact, SchedulerLimits(slots=2)), None
    for number in count(1):
        exact.call("fail_allocation", str(number), "0")
        try:
            handle = scheduler.submit([3, 14], **LOSSLESS, max_new_tokens=4, stop_token_ids=[])
        except RuntimeError:
            assert scheduler.waiting == 0
            continue
        expected = expected or handle.result().tokens
        assert handle.result().tokens == expected
        if not exact.call("allocation_failed"):
            break
    assert number > 5
