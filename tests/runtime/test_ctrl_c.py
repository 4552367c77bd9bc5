"""Ctrl-C, a real SIGINT from another process: it ends whatever runs, and what comes after it has the right tokens."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_model import TinyModel

CHILD = """
import asyncio, faulthandler, signal, sys
from tide_export import load
from tide_export.runtime.scheduler import SchedulerLimits

ENDLESS = {"max_new_tokens": 10**9, "stop_token_ids": []}
MANY, LONG = 2000, {"max_new_tokens": 200, "mode": "full", "stop_token_ids": []}  # for a minute
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
faulthandler.dump_traceback_later(100, exit=True)
endless, batched = (load(path, threads=1) for path in sys.argv[1:3])
schedulers = [batched.scheduler(SchedulerLimits(slots=2)) for _ in range(4)]
scheduler, threaded, watched, drained = schedulers


def results(one):
    for handle in [one.submit([5], **LONG) for _ in range(MANY)]:
        handle.result()


async def read(one):
    for handle in [one.submit([5], **LONG) for _ in range(MANY)]:
        async for _ in handle:
            pass


def loads():
    while True:
        load(sys.argv[1], threads=1)


for _ in range(MANY):
    drained.submit([5], **LONG)


def hooked(ids, logits):
    return logits


KINDS = {
    "generate": lambda: endless.generate([5], **ENDLESS),
    "stream": lambda: list(endless.stream([5], **ENDLESS)),
    "lossless": lambda: endless.generate([5, 6, 5], mode="lossless", threshold=0.3, **ENDLESS),
    "a hook": lambda: endless.generate([5], logits_processor=hooked, **ENDLESS),
    "list": lambda: batched.generate([[5]] * MANY, **LONG),
    "results": lambda: results(scheduler),
    "results of a thread": lambda: results(threaded.start()),
    "async for": lambda: asyncio.run(read(watched.start())),
    "a drain": drained.close,
    "a drain by a thread": threaded.close,
    "loads": loads,
}
known = {id(e): e.generate([5, 9], max_new_tokens=8).tokens for e in (endless, batched)}
for name, work in KINDS.items():
    print(name, flush=True)
    try:
        work()
        print("ended", flush=True)
    except KeyboardInterrupt:
        right = all(known[id(e)] == e.generate([5, 9], max_new_tokens=8).tokens for e in (endless, batched))
        print("interrupted, and goes on" if right else "interrupted, and is wrong", flush=True)
print("=", *(one.closed for one in schedulers))
watched.close(drain=False)
scheduler.close(drain=False)
print(*((one.waiting, one.running) for one in schedulers))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals")
def test_it_ends_whatever_runs(demo_bundle: Path, tmp_path: Path) -> None:
    endless = TinyModel(context=None).write(tmp_path / "endless")
    command = [sys.executable, "-c", CHILD, str(endless), str(demo_bundle)]
    said = dict[str, str]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        while (kind := child.stdout.readline().strip()).strip("=") == kind != "":
            time.sleep(0.2)
            child.send_signal(signal.SIGINT)
            said[kind] = child.stdout.readline().strip()
        rest, errors = child.stdout.read(), child.stderr.read()
    assert (child.returncode, errors) == (0, "")
    assert len(said) == 11
    assert set(said.values()) == {"interrupted, and goes on"}, said
    assert kind == "= False True False True", "a drain that ends cancels"
    assert rest.strip() == " ".join(["(0, 0)"] * 4)
