"""A read that an exception ends: nothing is lost, and nothing is fed twice."""

import signal
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caller_networks import callers_engine
from tiny_engines import TinyLlama
from tiny_model import TinyModel

from tide_export.bundle.file_names import WEIGHTS_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine, load, open_engine
from tide_export.runtime.generation import Generation
from tide_export.runtime.token_stream import TokenStream

PROMPT = [5, 17, 3, 17, 3]
TOKENS = 6
CASES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "exit": {"mode": "exit", "threshold": [0.5, 0.65], "max_pending": 2},
    "exit, drawn": {"mode": "exit", "threshold": 0.5, "temperature": 1.5, "seed": 3},
    "lossless": {"mode": "lossless", "threshold": 0.4, "max_pending": 2, "prompt_lookup": 3},
    "lossless, changed": {"mode": "lossless", "threshold": 0.4, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    "lossless, drawn": {"mode": "lossless", "threshold": 0.4, "prompt_lookup": 0, "temperature": 1.5, "seed": 5},
}


class Ended(Exception):
    """What ends a read."""


class OnceAt:
    """Raises `error` the time of this number that it is called."""

    def __init__(self, number: int, error: Callable[[], BaseException]) -> None:
        self.number, self.error, self.calls, self.raised = number, error, 0, False

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.number + 1:
            self.raised = True
            raise self.error()


def read_all(stream: TokenStream) -> int:
    """Reads to the end; how often a read failed."""
    failed = 0
    while True:
        before = list(stream.tokens)
        try:
            next(stream)
        except StopIteration:
            return failed
        except (KeyboardInterrupt, GenerationError):
            failed += 1
            assert stream.tokens == before
            assert stream.finish_reason is None


def assert_equal(stream: TokenStream, expected: Generation) -> None:
    assert stream.tokens == expected.tokens
    assert stream.finish_reason == expected.finish_reason
    counts = [
        {name: value for name, value in one.as_dict().items() if "second" not in name}
        for one in (stream.stats, expected.stats)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("error", [Ended, KeyboardInterrupt])
def test_a_read_that_fails_makes_the_same_token_next(tiny_engine: Engine, name: str, error) -> None:
    """A failure of the logits processor, wherever it comes."""
    expected = tiny_engine.generate(PROMPT, max_new_tokens=TOKENS, **CASES[name])
    for number in count():
        once = OnceAt(number, error)

        def process(ids: list[int], logits: np.ndarray, once: OnceAt = once) -> np.ndarray:
            once()
            return logits

        stream = tiny_engine.stream(PROMPT, max_new_tokens=TOKENS, logits_processor=process, **CASES[name])
        assert read_all(stream) == once.raised
        assert_equal(stream, expected)
        if not once.raised:
            assert number >= TOKENS
            return


@pytest.mark.parametrize("name", CASES)
def test_a_network_that_fails_has_changed_nothing(tiny_llama: TinyLlama, name: str) -> None:
    """A failure of any run of any segment, and of the head."""
    engine, networks = callers_engine(open_bundle(tiny_llama.exact))
    expected = engine.generate(PROMPT, max_new_tokens=TOKENS, **CASES[name])
    for number in count():
        once = OnceAt(number, Ended)
        networks.after = lambda run, tensors, once=once: once()
        stream = engine.stream(PROMPT, max_new_tokens=TOKENS, **CASES[name])
        assert read_all(stream) == once.raised
        assert_equal(stream, expected)
        if not once.raised:
            assert number >= TOKENS
            return


@pytest.fixture
def soon() -> Iterator[Callable[[float], None]]:
    """A signal that comes after so many seconds and raises Ended."""

    def ended(*_: Any) -> None:
        raise Ended

    before = signal.signal(signal.SIGALRM, ended)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_ends_a_read_between_steps(tiny_engine: Engine, soon: Callable[[float], None]) -> None:
    options = {"mode": "lossless", "max_new_tokens": 200, "stop_token_ids": []}
    expected = tiny_engine.generate(PROMPT, **options)
    ended = 0
    for microseconds in range(50, 3000, 150):
        stream = tiny_engine.stream(PROMPT, **options)
        try:
            soon(microseconds * 1e-6)
            list(stream)
            soon(0)
        except Ended:
            ended += 1
        list(stream)
        assert_equal(stream, expected)
    assert ended


def test_a_load_that_a_signal_ends_leaves_no_engine(wide_bundle: Path, soon: Callable[[float], None]) -> None:
    """Nor the weights that it maps: most of a load is in the library, where the signal waits for its end."""

    def mapped() -> bool:
        return str(wide_bundle / WEIGHTS_FILE) in Path("/proc/self/maps").read_text()

    bundle, ended = open_bundle(wide_bundle, verify=False), 0
    for microseconds in range(200, 8000, 200):
        try:
            soon(microseconds * 1e-6)
            engine = open_engine(bundle, "cpu", threads=1)
            soon(0)
        except Ended:
            ended += 1
        engine = None  # the signal may come when it is there already
        assert not mapped()
    assert ended > 5
    engine = open_engine(bundle, "cpu", threads=1)
    assert mapped()
    assert engine.generate(PROMPT, max_new_tokens=1).tokens


@pytest.mark.parametrize("mode", ["full", "exit", "lossless"])
def test_after_an_error_the_same_error_comes_again(tiny_engine: Engine, tmp_path: Path, mode: str) -> None:
    expected = tiny_engine.generate(PROMPT, max_new_tokens=20, mode=mode).tokens
    broken = next(token for token in expected[2:] if token not in PROMPT)  # what comes after it is not a number

    class Broken(TinyModel):
        def weights(self) -> dict[str, np.ndarray]:
            made = super().weights()
            made["embed"][broken] = np.nan
            return made

    stream = load(Broken().write(tmp_path / "broken")).stream(PROMPT, max_new_tokens=20, mode=mode)
    for _ in range(3):
        with pytest.raises(GenerationError, match="the model's logits are not finite"):
            list(stream)
    assert stream.tokens == expected[: expected.index(broken) + 1]
    assert stream.finish_reason is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_signal_while_an_object_is_freed_is_not_lost(tiny_engine: Engine, error: type[BaseException]) -> None:
    """Python ignores what a finalizer raises, so the library's next call does."""
    freed = Freed()
    weakref.finalize(freed, raising, error)
    del freed
    with pytest.raises(error):
        tiny_engine.generate([5], max_new_tokens=2)
    assert len(tiny_engine.generate([5], max_new_tokens=2).tokens) == 2


class Freed:
    """An object with a finalizer."""


def raising(error: type[BaseException]) -> None:
    raise error
