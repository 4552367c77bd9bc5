"""Several processes give the sample that one gives, bit for bit; one that dies hangs no other and costs no work."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import collecting
import numpy as np
import pytest

from tide_export.calibration import distributed as processes
from tide_export.calibration.distributed import Processes
from tide_export.cli.main import main
from tide_export.errors import CalibrationError
from tide_export.routers.router_set import RouterSet

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("collecting.py")
LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


def environment(temporary, **more):
    """As many threads as this process has: torch adds up in another order with another number."""
    import torch

    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    threads = str(torch.get_num_threads())
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "TMPDIR": str(temporary)} | more


@pytest.fixture(scope="module")
def expected(demo):
    return collecting.arrays(collecting.sample_of(demo))


def same(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array), name


@pytest.mark.exhaustive
def test_two_processes_calibrate_to_the_file_that_one_writes(tmp_path):
    """All the way through the command line, started by accelerate, whose launcher is torchrun's: prompts answered,
    checkpoints chosen, lenses and routers fitted, one report written."""
    command = ["calibrate", str(ROOT / "demo" / "demo-llama"), "-q"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"def {name}(value):" for name in "abcdefghijklmnopqrst"))
    command += ["--self-generated", str(prompts), "--calibration-batch", "6"]
    command += ["--checkpoints", "auto", "--exit-strategy", "lens", "--lens-rank", "4", "--lens-epochs", "1"]
    command += ["--router-epochs", "2"]
    command += ["--calibration-samples", "16", "--calibration-length", "64"]
    for name in ("one", "two", "tmp"):
        (tmp_path / name).mkdir()
    output = ["-o", str(tmp_path / "one" / "r.safetensors")]
    assert main([*command, *output]) == 0
    output = ["-o", str(tmp_path / "two" / "r.safetensors"), "--report", str(tmp_path / "two" / "report.html")]
    done = subprocess.run(
        [*LAUNCH, "-m", "tide_export.cli.main", *command, *output],
        env=environment(tmp_path / "tmp"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'two' / 'r.safetensors'}\n"  # of the main process alone
    assert not list((tmp_path / "tmp").glob("tide-calibration-*"))
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"r.safetensors", "report.html", "report.png"}
    one, two = (RouterSet.load(tmp_path / name / "r.safetensors") for name in ("one", "two"))
    assert two.provenance == one.provenance
    same({n: t.numpy() for n, t in two.tensors().items()}, {n: t.numpy() for n, t in one.tensors().items()})


def test_one_dies_the_other_ends_and_the_rest_is_resumed(expected, demo, tmp_path, monkeypatch):
    """Without a launcher to stop the survivor: it must notice by itself. What both had done is kept."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(tmp_path / "cache"), "2", "1"],
        env=environment(tmp_path, **common),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert json.loads(done.stdout) == [1, -signal.SIGKILL], done.stderr
    assert "CalibrationError: another process of this run ended or hangs" in done.stderr
    assert not list(tmp_path.glob("*.npz"))

    batches = len(np.load(tmp_path / "cache" / "done.npy"))
    left = batches - batches // 2 - batches % 2 - 2  # process 0 did its half, process 1 did two
    passes = []
    raw_hidden = type(demo).raw_hidden
    monkeypatch.setattr(type(demo), "raw_hidden", lambda *args: passes.append(1) or raw_hidden(*args))
    same(collecting.arrays(collecting.sample_of(demo, tmp_path / "cache")), expected)
    assert 0 < left == len(passes) < batches
    same(collecting.arrays(collecting.sample_of(demo, tmp_path / "cache")), expected)
    assert len(passes) == left  # a complete folder is only read


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {"WORLD_SIZE": "8"}])
def test_alone_without_a_launcher(variables, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "_join", lambda: pytest.fail("accelerate was asked"))
    alone = Processes.current()
    assert (alone.rank, alone.count, alone.main) == (0, 1, True)
    alone.barrier()
    assert alone.from_main(lambda: "folder") == "folder"


def test_processes_on_several_machines_are_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CalibrationError, match="4 processes on several machines"):
        Processes.current()
