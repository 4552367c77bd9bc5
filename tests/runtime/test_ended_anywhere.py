"""A call that a signal's exception ends between any two instructions: nothing is lost, fed twice or kept."""

import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interruptions import interrupted
from tiny_engines import TinyLlama

from tide_export import names
from tide_export.bundle.opened import open_bundle
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.providers import open_library_engine
from tide_export.runtime.scheduler import SchedulerLimits

PROMPT, PROMPTS = [5, 17, 3], [[5, 17, 3], [8], [9, 9, 4, 2, 1]]
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "stop_token_ids": []}


def slightly(ids: list[int], logits: np.ndarray) -> np.ndarray:
    """A hook, so that there is Python in a step too."""
    logits[ids[-1]] -= 0.5
    return logits


CASES: dict[str, dict[str, Any]] = {
    "full": GREEDY | {"mode": "full"},
    "a hook": GREEDY | {"mode": "exit", "threshold": 0.5, "logits_processor": slightly},
    "lossless": GREEDY | {"mode": "lossless", "threshold": 0.4, "prompt_lookup": 3, "logprobs": 1},
}


@pytest.fixture(scope="module")
def engine(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


def every_point(start: Callable[[], Any], call: Callable[[Any], Any], fewest: int) -> Iterator[Any]:
    """What `start` made, after `call` of it was ended, for every point; there are `fewest` or more."""
    for point in count():
        made = start()
        if not interrupted(lambda made=made: call(made), point):
            assert point >= fewest
            return
        yield made


@pytest.mark.parametrize("name", CASES)
def test_a_stream_makes_the_same_tokens(engine: Engine, name: str) -> None:
    expected = engine.generate(PROMPT, **CASES[name])

    def started() -> Any:
        stream = engine.stream(PROMPT, **CASES[name])
        next(stream)
        return stream

    for call in (next, list):
        for stream in every_point(started, call, 10):
            before = list(stream.tokens)
            assert before == expected.tokens[: len(before)]
            assert before + list(stream) == expected.tokens
            assert stream.stats.exit_layer == expected.stats.exit_layer
            assert stream.logprobs == expected.logprobs


@pytest.mark.parametrize("name", ["full", "lossless"])
@pytest.mark.parametrize("threaded", [False, True])
def test_a_request_gives_all_its_tokens(engine: Engine, name: str, threaded: bool) -> None:
    expected = engine.generate(PROMPT, **CASES[name])
    scheduler = engine.scheduler(SchedulerLimits(slots=2))
    if threaded:
        scheduler.start()
    for handle in every_point(lambda: scheduler.submit(PROMPT, **CASES[name]), next, 10):
        first = [handle.tokens[0]] if handle.tokens and handle._returned else []  # of a read that had ended
        assert first + list(handle) == expected.tokens
    for handle in every_point(lambda: scheduler.submit(PROMPT, **CASES[name]), lambda one: one.result(), 20):
        assert handle.result().tokens == expected.tokens
    scheduler.close()


def test_a_list_leaves_the_engine_usable(engine: Engine) -> None:
    expected = [one.tokens for one in engine.generate(PROMPTS, **CASES["a hook"])]
    point = 0
    while interrupted(lambda: engine.generate(PROMPTS, **CASES["a hook"]), point):
        assert [one.tokens for one in engine.generate(PROMPTS, **CASES["a hook"])] == expected
        point += 1 + point // 4
    assert point > 300


def test_a_submission_leaves_the_scheduler_usable(engine: Engine) -> None:
    options = CASES["a hook"]
    scheduler, expected = engine.scheduler(SchedulerLimits(slots=2)), engine.generate(PROMPT, **options).tokens
    for _ in every_point(lambda: None, lambda _: scheduler.submit(PROMPT, **options), 40):
        assert scheduler.submit(PROMPT, **options).result().tokens == expected
    while scheduler.step():
        pass
    assert (scheduler.waiting, scheduler.running) == (0, 0)
    scheduler.submit(PROMPT, **options).result()
    assert not scheduler._hooks, "those of requests that nobody read are dropped too"


def test_a_load_leaves_no_engine(wide_bundle: Path) -> None:
    bundle = open_bundle(wide_bundle, verify=False)

    def opens(_: Any = None) -> Engine:
        return Engine(bundle, open_library_engine(bundle, "cpu", 1, False, None, None, None))

    def mapped() -> bool:
        return str(wide_bundle / names.WEIGHTS_FILE) in Path("/proc/self/maps").read_text()

    for _ in every_point(lambda: None, opens, 50):
        assert not mapped()
    engine = opens()
    assert mapped()
    assert engine.generate(PROMPT, max_new_tokens=2).tokens


def test_text_and_a_grammar_are_followed(demo_bundle: Path) -> None:
    engine = load(demo_bundle, provider="cpu", threads=1, verify=False)
    ids = engine.tokenizer.encode("def read_lines(path):")
    options: dict[str, Any] = {"max_new_tokens": 6, "mode": "lossless", "threshold": 0.3, "prompt_lookup": 3}
    for more in ({"stop": ["path", "\n\n"]}, {"regex": "[a-z ]+", "stop": ["zzz"]}, {"detokenize": True}):
        expected = engine.generate(ids, **options, **more)
        point = 0
        while True:
            stream = engine.stream(ids, **options, **more)
            if not interrupted(lambda stream=stream: list(stream), point):
                break
            list(stream)
            assert (stream.text, stream.tokens) == (expected.text, expected.tokens)
            point += 7 + point // 5
        assert point > 50
        assert "regex" not in more or re.fullmatch("[a-z ]+", expected.text)
