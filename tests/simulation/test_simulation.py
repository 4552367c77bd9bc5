"""Simulated schedulers (simulate.cpp), one seed after the other: ten seconds, in `make test-all` ten minutes."""

import itertools
import json
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from native_builds import Builds
from simulation.simulation_build import build
from simulation.table_bundles import write_bundles
from tiers import sized

SECONDS = sized(10, 600)
FIRST = sized(0, 100000)  # seed
# What must have happened in ten seconds; all of it happens some hundred times.
HAPPENED = ("cancelled", "timeout", "stop", "length", "context", "failed", "hook threw", "queue full", "too large")
HAPPENED += ("exits", "drafts accepted", "drafter's accepted", "cached tokens", "steps of several")
HAPPENED += ("allocations that failed", "runs that failed")
LEAST = 3  # seeds, however slow the machine is


@pytest.fixture(scope="module")
def program() -> Path:
    return build(Builds())


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write_bundles(folder)
    return folder


def simulate(program: Path, bundles: Path, seed: int) -> Counter[str]:
    command = [str(program), str(bundles), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n(in {bundles}: write_bundles of table_bundles.py makes them anew)"
    return Counter(json.loads(done.stdout))


def test_schedulers(program: Path, bundles: Path) -> None:
    """No token differs, every request ends once, nothing starves, and what is counted in `invariants.cpp` holds."""
    happened, ends = Counter[str](), time.monotonic() + SECONDS
    for seed in itertools.count(FIRST):
        happened += simulate(program, bundles, seed)
        if time.monotonic() > ends and seed >= FIRST + LEAST:
            break
    assert all(happened[what] > 0 for what in HAPPENED), happened


def test_a_seed_replays_a_whole_run(program: Path, bundles: Path) -> None:
    assert simulate(program, bundles, 7) == simulate(program, bundles, 7)
