"""Several engines in a process, and processes that are forked from one with an engine."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import TinyLlama
from tiny_model import TinyModel

from tide_export.runtime.engine import load
from tide_export.runtime.scheduler import SchedulerLimits

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "mode": "full", "stop_token_ids": []}
PROMPT = [5, 9, 17]
SECONDS = 60  # after which a child hangs


def test_engines_on_several_bundles_and_threads(tiny_llama: TinyLlama, tiny_bundle: Path, tmp_path: Path) -> None:
    """Each with threads of its own, used by several threads at once, and by schedulers."""
    other = TinyModel(seed=5, vocabulary=100, context=None).write(tmp_path / "other")
    paths = [tiny_bundle, other, tiny_llama.exact, tiny_llama.exact]
    alone = [load(path, threads=1).generate(PROMPT, **GREEDY).tokens for path in paths]
    assert len({tuple(tokens) for tokens in alone}) == 3
    engines = [load(path, threads=1 + number % 2) for number, path in enumerate(paths)]
    schedulers = [engine.scheduler(SchedulerLimits(slots=2)).start() for engine in engines[2:]]
    found = list[tuple[int, list[int]]]()

    def work(number: int) -> None:
        for _ in range(6):
            found.append((number, engines[number].generate(PROMPT, **GREEDY).tokens))
            if number >= 2:
                found.append((number, schedulers[number - 2].submit(PROMPT, **GREEDY).result().tokens))

    workers = [threading.Thread(target=work, args=(number % len(paths),)) for number in range(2 * len(paths))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 2 * 6 * (len(paths) + 2)
    assert all(tokens == alone[number] for number, tokens in found)
    engines.pop()  # of whom a scheduler is left
    assert schedulers[-1].submit(PROMPT, **GREEDY).result().tokens == alone[-1]
    for scheduler in schedulers:
        scheduler.close()


FORKING = """
import gc, os, signal, sys
from tide_export import load
from tide_export.errors import GenerationError

signal.alarm(50)  # ends it where it hangs
OPTIONS = {"max_new_tokens": 6, "mode": "full", "stop_token_ids": []}
bundle, what = sys.argv[1:]
engine = load(bundle, threads=2)
tokens = engine.generate([5, 9], **OPTIONS).tokens
scheduler, threaded = engine.scheduler(), engine.scheduler().start()
stream, sequence, batch = engine.stream([5, 9], **OPTIONS), engine.start([2.0, 2.0]), engine.start_batch(1.0, 2)
begun, running = scheduler.submit([5, 9], **OPTIONS), threaded.submit([5, 9], **OPTIONS | {"max_new_tokens": 200})
next(stream), next(begun), next(running), sequence.step([5, 9])
slot = batch.join([2.0, 2.0], 4)
USES = {
    "generate": lambda: engine.generate([5, 9], **OPTIONS),
    "list": lambda: engine.generate([[5], [9]], **OPTIONS),
    "stream": lambda: engine.stream([5, 9], **OPTIONS),
    "a stream": lambda: next(stream),
    "start": lambda: engine.start([2.0, 2.0]),
    "a sequence": lambda: sequence.step([7]),
    "start_batch": lambda: engine.start_batch(1.0, 2),
    "a batch": lambda: batch.step({slot: [7]}),
    "scheduler": lambda: engine.scheduler(),
    "submit": lambda: scheduler.submit([5], **OPTIONS),
    "submit to a thread": lambda: threaded.submit([5], **OPTIONS),
    "start a thread": lambda: scheduler.start(),
    "a request": lambda: begun.result(),
    "a request of a thread": lambda: running.result(),
    "its tokens so far": lambda: running.stats,
}
child = os.fork()
if child == 0:
    signal.alarm(40)
    if what == "uses":
        for name, use in USES.items():
            try:
                print(name, use())
            except GenerationError as error:
                assert str(error).startswith("the engine was loaded before this process was forked"), name
                assert "load the bundle in this process, or start it by spawn" in str(error)
        assert not scheduler.step() and (scheduler.waiting, scheduler.running, scheduler.closed) == (0, 0, True)
        running.cancel()
        scheduler.close()
        threaded.close()
    if what == "loads":
        again = load(bundle, threads=2)
        assert again.generate([5, 9], **OPTIONS).tokens == tokens
        with again.scheduler() as own:
            assert own.submit([5, 9], **OPTIONS).result().tokens == tokens
    if what == "frees":
        del engine, scheduler, threaded, stream, sequence, batch, begun, running, USES
        gc.collect()
    print("done", flush=True)
    sys.exit()  # which frees what is left
assert os.waitpid(child, 0)[1] == 0
assert engine.generate([5, 9], **OPTIONS).tokens == tokens, "the parent goes on"
assert [*stream] and stream.tokens == tokens == begun.result().tokens
assert running.result().tokens[:6] == tokens
threaded.close()
print("parent")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("what", ["uses", "loads", "frees", "ends"])
def test_a_forked_child_never_hangs(tiny_llama: TinyLlama, what: str) -> None:
    """It uses what its parent made, loads the bundle again, frees what it has, or just ends."""
    command = [sys.executable, "-c", FORKING, str(tiny_llama.exact), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert (done.stdout, done.stderr, done.returncode) == ("done\nparent\n", "", 0)
