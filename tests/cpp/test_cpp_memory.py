"""Calls that run out of memory, at every allocation in turn: each ends with an error or is unaffected, and what follows
has the tokens of an undisturbed run."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypeVar

import pytest
from cpp_builds import cuda_headers
from cpp_engine import CppBatch, CppEngine, CppState, facts, words

from tide_export.errors import TideError
from tide_export.runtime.sequence import StepResult

T = TypeVar("T")
MIXED = [0.5, 0.5]
DEVICES = ["graph", "propagating", "host", *(["gpu"] if cuda_headers() else [])]


def failures(
    engine: CppEngine, prepare: Callable[[], T], call: Callable[[T], Any], every: int = 1, again: int = 0
) -> Iterator[tuple[T, Any]]:
    """Yields what `prepare` returns after a `call` of it in which an allocation failed, and the call's result (None: it
    ended with an error), for every allocation that it makes, or `every` so many. The allocation `again` after it fails
    too."""
    for number in count(1, every):
        subject = prepare()
        engine.call("fail_allocation", str(number), str(again))
        try:
            result = call(subject)
        except TideError:
            result = None
        except RuntimeError as error:
            if str(error) != "std::bad_alloc":
                raise
            result = None
        if not engine.call("allocation_failed"):
            return
        yield subject, result


def shown(result: StepResult) -> Any:
    return result.position_logits.tobytes(), result.exit_layer, result.segments_run, result.scores.tobytes()


@pytest.fixture(scope="module")
def engines(tiny_llama, open_cpp: Callable[..., CppEngine]) -> dict[str, CppEngine]:
    bundles = {name: tiny_llama.propagating if name == "propagating" else tiny_llama.exact for name in DEVICES}
    return {name: open_cpp(bundles[name], networks=name if name in DEVICES[2:] else None) for name in DEVICES}


@pytest.fixture(params=DEVICES)
def engine(request: pytest.FixtureRequest, engines: dict[str, CppEngine]) -> CppEngine:
    return engines[request.param]


# --- one sequence ----------------------------------------------------------------------------------------------------


def begun(engine: CppEngine) -> CppState:
    """A sequence with pending tokens and full buffers."""
    state = engine.start(MIXED, 16, room=0)
    for ids in ([3, 14, 15], [9], [2], [6]):
        state.step(ids)
    return state


def facts_of(state: CppState) -> Any:
    state._take(state._engine.call("state", state._number))
    return state.lengths, state.computed, state.pending


def after(state: CppState) -> list[Any]:
    """Steps of one token, of several, and to the next growth."""
    return [shown(state.step(ids, 2)) for ids in ([9], [7], [9, 3], [1], [2, 3, 5, 7, 11], [1])]


def exhausted(engine: CppEngine, call: Callable[[CppState], Any]) -> int:
    """Compares `call`, and the steps after it, with an undisturbed sequence's; returns its allocations."""
    undisturbed, other = begun(engine), begun(engine)
    before = facts_of(undisturbed)
    without, expected = after(undisturbed), [call(other), *after(other)]
    number = 0
    for state, result in failures(engine, lambda: begun(engine), call):
        number += 1
        if result is None:
            assert facts_of(state) == before
            assert after(state) == without
        else:
            assert [result, *after(state)] == expected
    return number


def test_a_step_that_grows(engine: CppEngine) -> None:
    assert exhausted(engine, lambda state: shown(state.step([5, 3, 5, 8], 3))) > 40


def test_a_step_of_one_token(engine: CppEngine) -> None:
    assert exhausted(engine, lambda state: shown(state.step([5], 1))) > 5


def test_a_rewind(engines: dict[str, CppEngine]) -> None:
    def rewind(state: CppState) -> Any:
        state.rewind(4)
        return facts_of(state)

    assert exhausted(engines["graph"], rewind) > 1


# --- a batch ---------------------------------------------------------------------------------------------------------

LONG = [(7 * i) % 32 for i in range(130)]  # more than a packed sequence has room for at first


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest, tiny_llama, engines: dict[str, CppEngine]) -> CppEngine:
    if request.param == "segments":
        CppBatch.load(engines["graph"], tiny_llama.exact, "host")
    else:
        CppBatch.load(engines["graph"], getattr(tiny_llama, request.param))
    return engines["graph"]


def step(batch: CppBatch, new: dict[int, list[int]], keep: int = 1) -> dict[int, Any]:
    return {slot: shown(result) for slot, result in batch.step(new, dict.fromkeys(new, keep), ()).items()}


def joined(engine: CppEngine) -> CppBatch:
    """Three sequences with pending tokens."""
    batch = CppBatch(engine, 1.0, 8)
    slots = [batch.join(MIXED, 16) for _ in range(3)]
    for ids in ([3, 14, 15], [9], [2]):
        step(batch, {slot: [*ids, *ids[:1]][: len(ids)] for slot in slots})
    return batch


def grown(batch: CppBatch) -> Any:
    first, second, _ = batch.sequences
    return step(batch, {first: LONG, second: LONG[1:]}, 3)


def left(batch: CppBatch) -> Any:
    first, second, _ = batch.sequences
    batch.leave(first)
    return step(batch, {second: [8]})


def continued(batch: CppBatch) -> list[Any]:
    """First a step without those that `call` was about, then with a new sequence, then of all."""
    last = max(batch.sequences)
    results = [step(batch, {last: [5]})]
    slot = batch.join(MIXED, 16)
    results.append(step(batch, {last: [6]}))
    results.append(step(batch, {slot: [1, 2, 3]}))
    return [*results, *(step(batch, {every: [token] for every in batch.sequences}) for token in (4, 9))]


@pytest.mark.parametrize(
    ("batches", "call"),
    [("exact", grown), ("exact", left), ("propagating", grown), ("propagating", left), ("segments", left)],
    indirect=["batches"],
)
def test_a_step_of_a_batch(batches: CppEngine, call: Callable[[CppBatch], Any]) -> None:
    def facts_of(batch: CppBatch) -> Any:
        batch._take(batches.call("batch_describe", str(min(batch.sequences))))
        return {slot: (one.lengths, one.computed, one.pending) for slot, one in batch.sequences.items()}

    undisturbed = joined(batches)
    if call is left:
        undisturbed.leave(min(undisturbed.sequences))
    before, without = facts_of(undisturbed), continued(undisturbed)
    other = joined(batches)
    expected = [call(other), *continued(other)]
    number = 0
    for batch, result in failures(batches, lambda: joined(batches), call):
        number += 1
        if result is None:
            assert facts_of(batch) == before
            assert continued(batch) == without
        else:
            assert [result, *continued(batch)] == expected
    assert number > 40


# --- generations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "lossless"])
@pytest.mark.parametrize("device", ["graph", *DEVICES[2:]])
def test_a_generation(engines: dict[str, CppEngine], device: str, mode: str) -> None:
    engine = engines[device]
    options: dict[str, Any] = {"mode": mode, "threshold": None if mode == "full" else 0.5, "stop_token_ids": []}

    def generate(prompt: list[int]) -> Any:
        return facts(engine.generate(prompt, 4, **options))

    expected = generate([3, 14, 15])
    for prompt, result in failures(engine, lambda: [3, 14, 15], generate):
        assert result in (None, expected)
        assert generate(prompt) == expected


def test_the_first_list(tiny_llama, open_cpp: Callable[..., CppEngine]) -> None:
    """It opens the networks for batches, which later lists share."""
    engine = open_cpp(tiny_llama.exact)

    def generate(_: Any) -> Any:
        lists = engine.generate_batch([[3, 14, 15], [9, 2]], max_new_tokens=2, threshold=0.5, stop_token_ids=[])
        return [facts(one) for one in lists]

    def load() -> None:
        engine.call("load", str(tiny_llama.exact), *words(threads=1))

    expected, failed = generate(None), 0
    for _, result in failures(engine, load, generate, every=101):
        assert result in (None, expected)
        assert generate(None) == expected
        failed += 1
    assert failed > 4
