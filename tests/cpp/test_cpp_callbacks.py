"""Callbacks of a C++ program that throw, at every token: the exception reaches the caller as it was thrown, and the
engine gives the same tokens after it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpp_engine import CppEngine, prompts_of, words

COUNT = 9
PROMPT, PROMPTS = [3, 14, 15, 9], [[3, 14, 15, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9]]
MODES: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "exit", "threshold": 0.5},
    {"mode": "exit", "temperature": 0.8, "seed": 3, "threshold": 0.5},
    {"mode": "lossless", "threshold": 0.5, "max_pending": 3, "prompt_lookup": 3},
]
# Propagated K/V have no lossless mode.
LISTS = [*(("exact", mode) for mode in MODES), *(("propagating", mode) for mode in MODES[:3])]


def resources(engine: CppEngine) -> tuple[int, int]:
    """Threads and open files of the driver's process."""
    process = Path(f"/proc/{engine.pid}")
    return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))


@pytest.fixture(scope="module")
def engines(tiny_llama, open_cpp: Callable[..., CppEngine]) -> dict[str, CppEngine]:
    return {
        "exact": open_cpp(tiny_llama.exact),
        "propagating": open_cpp(tiny_llama.propagating),
        "networks": open_cpp(tiny_llama.exact, networks="host"),
    }


@pytest.mark.parametrize(("kind", "mode"), [*LISTS, *(("networks", mode) for mode in MODES)], ids=str)
def test_a_stream(engines: dict[str, CppEngine], kind: str, mode: dict[str, Any]) -> None:
    engine = engines[kind]
    request = engine.request(PROMPT, COUNT, stop_token_ids=[], **mode)
    expected = engine.call("generate", *request)["tokens"]
    assert len(expected) == COUNT
    before = resources(engine)
    for k in range(1, COUNT + 1):
        assert engine.call("stream", str(-k), *request) == {"taken": expected[:k], "thrown": k}
        assert engine.call("generate", *request)["tokens"] == expected
    assert resources(engine) == before


@pytest.mark.parametrize(("kind", "mode"), LISTS, ids=str)
def test_a_list(engines: dict[str, CppEngine], kind: str, mode: dict[str, Any]) -> None:
    """The exception ends the whole list; what the other prompts had until then are their tokens."""
    engine = engines[kind]
    request = [*prompts_of(PROMPTS), *words(max_new_tokens=COUNT, stop_token_ids=[], **mode)]
    expected = [one["tokens"] for one in engine.call("generate_batch", *request)]
    before = resources(engine)
    for number in range(len(PROMPTS)):
        for k in range(1, COUNT + 1):
            answer = engine.call("stream_batch", str(number), str(-k), *request)
            assert answer["thrown"] == len(answer["taken"][number]) == k
            assert all(taken == whole[: len(taken)] for taken, whole in zip(answer["taken"], expected, strict=True))
        assert [one["tokens"] for one in engine.call("generate_batch", *request)] == expected
    assert resources(engine) == before
