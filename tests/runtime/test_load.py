"""Many threads on one engine, in all modes, with streams dropped and exceptions thrown in: a serial run's tokens, and
nothing is left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
from load_run import KINDS

SECONDS = int(os.environ.get("TIDE_LOAD_SECONDS", tiers.sized("1", "12")))


def test_64_threads_give_the_tokens_of_a_serial_run_and_memory_stays_flat(request: pytest.FixtureRequest) -> None:
    bundle = request.getfixturevalue("demo_bundle") if tiers.ALL else request.getfixturevalue("tiny_llama").exact
    script = Path(__file__).with_name("load_run.py")
    # Not measured by coverage: an exception thrown into a thread would leave its lock taken.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, script, bundle, str(SECONDS), "64", os.environ.get("TIDE_SEED", "0")],
        env=environment | {"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["violations"] == []
    assert all(found.get(kind, 0) > 0 for kind in KINDS), found
    assert (found["stuck threads"], found["more threads after"], found["more open files after"]) == (0, 0, 0)
    assert found["MiB at the end"] < 1.25 * found["MiB after warm-up"] + 16, found
