"""Objects that serve one call at a time refuse a second one; daemon threads do not crash the interpreter's end."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiers

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine, load

PROMPT = [3, 14, 15]
SHORT: dict[str, Any] = {"mode": "full", "max_new_tokens": 64, "stop_token_ids": []}


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Engine:
    return load(tiny_llama.exact, provider="cpu", threads=1)


ENDING = """
import itertools, sys, threading, time
import numpy as np
from tide_export.runtime.engine import load
from tide_export.runtime.scheduler import SchedulerLimits

engine, prompt, turns = load(sys.argv[1], threads=1), [3, 14, 15], itertools.count()
full = {"mode": "full", "max_new_tokens": 40, "stop_token_ids": []}
scheduler = engine.scheduler(SchedulerLimits(slots=2))
sequence, batch = engine.start([2.0, 2.0]), engine.start_batch(0.0, 2)
slot = batch.join([2.0, 2.0], 10)

def processed(ids, logits):
    next(turns)
    return logits

def steps():
    for state in (sequence, batch.sequences[slot]):
        if state.length > 100:
            state.rewind(1)
    sequence.step([5])
    batch.step({slot: [5]})

finished, stream = scheduler.submit(prompt, **full), engine.stream(prompt, **full)
if sys.argv[2] == "reads":
    finished.result(), stream.finish()
kinds = {
    "reads": lambda: (finished.mode, finished.stats, finished.cached_tokens, stream.stats, scheduler.waiting),
    "generate": lambda: engine.generate(prompt, **full),
    "list": lambda: engine.generate([prompt, prompt], **full),
    "embed": lambda: engine.embed(prompt * 20),
    "handle": lambda: scheduler.submit(prompt, **full).result(),
    "steps": steps,
    "hook": lambda: engine.generate(prompt, logits_processor=processed, **full),
    "hook of a handle": lambda: scheduler.submit(prompt, logits_processor=processed, **full).result(),
}
if "handle" in sys.argv[2]:
    scheduler.start()

def work():
    while True:
        kinds[sys.argv[2]]()
        next(turns)

for _ in range(1 if sys.argv[2] in ("reads", "steps") else 3):
    threading.Thread(target=work, daemon=True).start()
while next(turns) < 200:
    time.sleep(0.001)
"""


@pytest.mark.parametrize("kind", ["reads", "generate", "list", "embed", "handle", "steps", "hook", "hook of a handle"])
def test_the_interpreter_ends_while_daemon_threads_generate(kind: str, tiny_llama) -> None:
    for _ in range(int(tiers.sized("1", "8"))):
        done = subprocess.run(
            [sys.executable, "-c", ENDING, tiny_llama.exact, kind],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except GenerationError as error:
        return "serves one call at a time: give each thread one of its own" in str(error)
    return False


def test_a_token_stream_in_use_refuses_another_call(engine: Engine) -> None:
    """A callback stands for another thread: both come in the middle of a call."""
    found = list[bool]()

    def asks(ids: list[int], logits: np.ndarray) -> np.ndarray:
        found.extend([refused(lambda: next(stream)), refused(lambda: stream.stats), refused(stream.finish)])
        return logits

    stream = engine.stream(PROMPT, logits_processor=asks, mode="full", max_new_tokens=3, stop_token_ids=[])
    expected = engine.generate(PROMPT, mode="full", max_new_tokens=3, stop_token_ids=[]).tokens
    assert list(stream) == stream.tokens == expected
    assert found == [True] * 9


def test_threads_that_share_an_object_get_answers_or_refusals(engine: Engine) -> None:
    """Whatever the order, nothing is corrupt, and all that was accepted has happened."""
    from concurrent.futures import ThreadPoolExecutor

    stream = engine.stream(PROMPT, **SHORT)
    sequence, batch = engine.start([2.0, 2.0]), engine.start_batch(0.0, 1)
    slot = batch.join([2.0, 2.0], 10)

    def several(call: Callable[[], object]) -> int:
        return sum(not refused(call) for _ in range(40))

    with ThreadPoolExecutor(4) as pool:
        stepped = sum(pool.map(several, [lambda: sequence.step([5])] * 4))
        batched = sum(pool.map(several, [lambda: batch.step({slot: [5]})] * 4))
        list(pool.map(several, [lambda: next(stream, None)] * 4))
    assert (sequence.length, batch.sequences[slot].length) == (stepped, batched)
    rest = stream.finish()
    assert stream.tokens == rest.tokens == engine.generate(PROMPT, **SHORT).tokens
