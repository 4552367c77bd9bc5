"""What the README's commands do: its export is the demo's, `make` installs what it pins, and the demo runs."""

import re
import subprocess
from pathlib import Path

import pytest
from documents import README, ROOT, commands, script_folder

from tide_export.cli.main import _config
from tide_export.cli.options import build_parser


def test_its_export_is_the_demo_s():
    """So the exhaustive test of demo/run.sh below runs it."""
    (words,) = [w for w in commands(README) if w[:2] == ["tide-export", "export"] and "demo/demo-llama" in w]
    written_out = build_parser().parse_args(words[1:])
    recipe = str(ROOT / "calibration" / "recipes" / "demo-llama.toml")
    by_recipe = build_parser().parse_args(["export", "demo/demo-llama", "-o", "x", "--recipe", recipe])
    assert _config(written_out) == _config(by_recipe)


def test_make_installs_torch_first_and_exactly_as_pinned(tmp_path: Path):
    command = ["make", "-n", "demo", f"VENV={tmp_path}/venv"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installs = [line.split("pip install", 1)[1].split()[-1] for line in lines if "pip install" in line]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (torch,) = [pin for pin in pins if pin.startswith("torch==")]
    assert installs == [torch, "'.[export,cpu]'"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_demo_runs_from_end_to_end(tmp_path: Path):
    """What `make demo` runs after installing, with this interpreter's `tide-export`; on less text."""
    command = ["sh", str(ROOT / "demo" / "run.sh"), str(tmp_path / "bundle")]
    env = script_folder(tmp_path, "--calibration-samples 100 --lens-tokens 20000")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "HOLDS: every token equals its reference" in done.stdout
    assert "layers per token" in done.stderr
    gained = done.stdout.partition("== gained\n")[2]
    assert re.search(r"^GAINED: .*[\d.]+x full depth's speed within the bounds of mode auto; [\d.]+x with ", gained), (
        gained
    )
    assert "Without --mode, mode auto is " in gained
    assert (tmp_path / "bundle-gained" / "gained.png").is_file()
