"""`tools/checks/first_run.sh`, with stand-ins for the driver, Python, trtexec and everything that it installs."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tide_export.cli.options import build_parser

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "checks" / "first_run.sh"
STEPS = ["gpu", "environment", "install", "versions", "export", "build", "inspect", "compare", "validate", "bench"]
# Each stand-in notes how it was called; `python3 -m venv` makes those that the environment has.
CALLED = (
    'printf "%s" "$(basename "$0")" >>"$CALLS"; for word; do printf "\\t%s" "$word" >>"$CALLS"; done; echo >>"$CALLS"\n'
)
FAILS = 'case " $* " in *" $FAILING "*) echo "it went wrong"; exit 3 ;; esac\n'
VENV = 'for name in python tide-export; do mkdir -p "$3/bin"; cp "$STANDINS/$name" "$3/bin/$name"; done\n'
BUILD = 'if [ "$1" = export ]; then mkdir -p "$4/engines"; touch "$4/engines/segment_00.engine"; fi\n'


class FirstRun:
    """The script on a machine of stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.path, self.out, self.calls = folder / "path", folder / "out", folder / "calls"
        standins = folder / "standins"
        for where, name, does in (
            (self.path, "nvidia-smi", "echo 'NVIDIA H100'\n"),
            (self.path, "python3", VENV),
            (self.path, "trtexec", ""),
            (standins, "python", ""),
            (standins, "tide-export", BUILD),
        ):
            where.mkdir(exist_ok=True)
            (where / name).write_text(f"#!/bin/sh\n{CALLED}{FAILS}{does}")
            (where / name).chmod(0o755)
        self.environment = {"PATH": f"{self.path}:/usr/bin:/bin", "CALLS": str(self.calls), "STANDINS": str(standins)}

    def __call__(self, *options: str, failing: str = "nothing") -> subprocess.CompletedProcess[str]:
        environment = os.environ | self.environment | {"FAILING": failing, "PYTHON": "python3"}
        command = ["sh", str(SCRIPT), "-o", str(self.out), *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    @property
    def report(self) -> dict[str, str]:
        """Outcomes by step, of the file that is sent back."""
        with tarfile.open(self.out / "first_run.tgz") as archive:
            member = archive.extractfile("first_run/report.md")
            assert member is not None
            rows = [line.strip("| ").split(" | ") for line in member.read().decode().splitlines() if line[:2] == "| "]
        return dict(rows[2:])

    def called(self, program: str) -> list[list[str]]:
        lines = [line.split("\t") for line in self.calls.read_text().splitlines()]
        return [words for name, *words in lines if name == program]


@pytest.fixture
def first_run(tmp_path: Path) -> FirstRun:
    return FirstRun(tmp_path)


@pytest.mark.parametrize(
    ("options", "flavour", "extras"),
    [
        ((), "tensorrt", "export,gpu"),
        (("-t", "tensorrt-rtx", "-m", "a/model"), "tensorrt-rtx", "export,rtx,cpu"),
        (("-t", "cuda"), "cuda", "export,cuda"),
    ],
)
def test_every_step_runs_and_one_file_holds_what_it_said(
    first_run: FirstRun, options: tuple[str, ...], flavour: str, extras: str
) -> None:
    done = first_run(*options)
    assert done.returncode == 0, done.stderr
    report = first_run.report
    steps = [step for step in STEPS if flavour != "cuda" or step not in ("build", "compare")]
    assert list(report) == [*steps, "bench-unrecorded" if flavour == "cuda" else "bench-host", "trtexec"]
    for name, outcome in report.items():
        assert outcome.startswith("not run" if name == "trtexec" and flavour != "tensorrt" else "passed in"), name
    with tarfile.open(first_run.out / "first_run.tgz") as archive:
        names = archive.getnames()
        assert {f"first_run/{step}.txt" for step in steps} < set(names)
        assert not [name for name in names if "bundle" in name or "venv" in name]
    assert done.stdout.splitlines()[-1].startswith(str(first_run.out / "first_run.tgz"))
    (install,) = (words for words in first_run.called("python") if "install" in words)
    assert install[-1] == f".[{extras}]"
    assert len(first_run.called("trtexec")) == (flavour == "tensorrt")


def test_the_commands_are_ones_that_tide_export_takes(first_run: FirstRun) -> None:
    assert first_run("-t", "cuda").returncode == 0
    commands = first_run.called("tide-export")
    assert [words[0] for words in commands] == ["export", "inspect", "validate", "bench", "bench"]
    for words in commands:
        build_parser().parse_args(words)
    first_run.calls.unlink()
    assert first_run("-m", "a/model").returncode == 0
    commands = first_run.called("tide-export")
    assert [words[0] for words in commands] == ["export", "build", "inspect", "validate", "bench", "bench"]
    for words in commands:
        build_parser().parse_args(words)
    assert commands[0][1] == commands[3][3] == "a/model"
    text = commands[0][commands[0].index("--dataset") + 1]
    assert (ROOT / text).is_file()
    scripts = [words[0] for words in first_run.called("python") if words[0].endswith(".py")]
    assert scripts == ["tools/checks/plans.py"]
    assert (ROOT / scripts[0]).is_file()


@pytest.mark.parametrize(
    ("failing", "step", "not_run"),
    [
        ("validate", "validate", []),
        ("build", "build", ["inspect", "compare", "validate", "bench", "bench-host", "trtexec"]),
        (
            "install",
            "install",
            ["versions", "export", "build", "inspect", "compare", "validate", "bench", "bench-host"],
        ),
    ],
)
def test_a_step_that_fails_is_recorded_and_the_others_go_on(
    first_run: FirstRun, failing: str, step: str, not_run: list[str]
) -> None:
    done = first_run(failing=failing)
    assert done.returncode == 1
    report = first_run.report
    assert report[step].startswith("failed with exit code 3")
    assert "it went wrong" in done.stdout
    assert [name for name, outcome in report.items() if "has not passed" in outcome][: len(not_run)] == not_run
    others = set(report) - {step, "trtexec", *not_run}
    assert all(report[name].startswith("passed") for name in others)


@pytest.mark.parametrize("options", [("-t", "onnxruntime"), ("-x",)])
def test_what_it_does_not_know_is_refused_with_its_usage(first_run: FirstRun, options: tuple[str, ...]) -> None:
    done = first_run(*options)
    assert done.returncode == 2
    assert "sh tools/checks/first_run.sh [-t cuda|tensorrt|tensorrt-rtx]" in done.stderr
    assert not first_run.calls.exists()


def test_help_is_its_usage_alone(first_run: FirstRun) -> None:
    done = first_run("-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert "sh tools/checks/first_run.sh [-t cuda|tensorrt|tensorrt-rtx]" in done.stdout
    assert not first_run.calls.exists()


def test_a_machine_without_a_gpu_is_refused(first_run: FirstRun) -> None:
    (first_run.path / "nvidia-smi").unlink()
    done = first_run()
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "run it on the machine with the GPU" in done.stderr
