"""Export and calibrate end whole wherever they are killed or the disk is full: old, new or nothing, and the next run
succeeds. (`test_flow`: one kill of `export`; tests/bundle: every moment of putting a bundle in place.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = int(os.environ.get("TIDE_KILLS", "24"))  # of each command; the long run has thousands
FULL = KILLS // 3
HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.exhaustive
def test_wherever_it_stops_the_output_is_old_new_or_absent_and_the_next_run_succeeds(tmp_path: Path) -> None:
    arguments = [tmp_path / "runs", KILLS, FULL, os.environ.get("TIDE_SEED", "0")]
    paths = os.pathsep.join(map(str, (HERE.parent, HERE.parents[1])))
    done = subprocess.run(
        [sys.executable, HERE / "interrupted_runs.py", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    for what, counts in outcomes.items():
        assert sum(counts.values()) == (FULL if "full" in what else KILLS)
        assert {"absent", "old"} <= counts.keys(), f"{what}: not every moment was tried: {counts}"
    assert "new" in outcomes["export killed"] | outcomes["calibrate killed"]
