"""`tools/checks/gpu_session.py`: whatever a step does, the others run and the report says what became of each."""

import json
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tide_export.cli.options import build_parser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def session() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools" / "checks"))
    try:
        import gpu_session
    finally:
        sys.path.remove(str(ROOT / "tools" / "checks"))
    return gpu_session


@pytest.fixture(scope="module")
def plan(session: ModuleType) -> ModuleType:
    return sys.modules["gpu_steps"]


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_a_step_that_goes_wrong_does_not_stop_the_others(
    session: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = session.Step
    todo = [
        step("good", "x", script("print('one'); print('two')")),
        step("bad", "x", script("import sys; print('why'); sys.exit(3)")),
        step("crash", "x", script("import os; os.abort()")),
        step("hangs", "x", script("import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"), 1),
        step("none", "x", ("no-such-program",)),
        step("tests", "x", script("print('SKIPPED [2] no GPU here'); print('2 skipped in 0.10s')")),
        step("some", "x", script("print('1 passed, 2 skipped in 0.10s')")),
        step("rests", "x", script(""), after=("bad",)),
        step("lacks", "x", script(""), lacks=(lambda: None, lambda: "no abacus here")),
        step(
            "last", "x", script("import os; print(os.environ['GIVEN'])"), after=("good",), environment=(("GIVEN", "7"),)
        ),
    ]
    monkeypatch.setattr(session, "steps", lambda *args: todo)
    assert session.main(["-o", str(tmp_path / "out")]) == 1
    found = {entry["step"]: entry for entry in json.loads((tmp_path / "out" / "report.json").read_text())}
    assert {name: entry["outcome"] for name, entry in found.items()} == {
        "good": "passed",
        "bad": "failed (exit code 3)",
        "crash": "failed (exit code -6)",
        "hangs": "timed out after 1 s",
        "none": "failed (cannot be started: No such file or directory)",
        "tests": "skipped: by all of its tests",
        "some": "passed",
        "rests": "skipped: bad has not passed",
        "lacks": "skipped: no abacus here",
        "last": "passed",
    }
    assert found["good"]["tail"] == ["one", "two"]
    assert found["last"]["tail"] == ["7"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| bad | failed (exit code 3) |" in page
    assert "why" in page

    todo[1] = step("bad", "x", script(""))
    assert session.main(["-o", str(tmp_path / "out"), "--only", "bad", "--only", "rests"]) == 1
    again = {entry["step"]: entry["outcome"] for entry in json.loads((tmp_path / "out" / "report.json").read_text())}
    assert (again["bad"], again["rests"], again["crash"]) == ("passed", "passed", "failed (exit code -6)")


def test_a_session_that_is_out_of_time_says_so(
    session: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = [session.Step("long", "", script("import time; time.sleep(60)")), session.Step("late", "", script(""))]
    monkeypatch.setattr(session, "steps", lambda *args: todo)
    started = time.monotonic()
    assert session.main(["-o", str(tmp_path), "--seconds", "1"]) == 1
    assert time.monotonic() - started < 20
    late = json.loads((tmp_path / "report.json").read_text())[1]
    assert late["outcome"] == "skipped: no time left"


@pytest.mark.parametrize("bundle", [None, "given"])
def test_every_command_is_one_that_exists(plan: ModuleType, tmp_path: Path, bundle: str | None) -> None:
    """Options of our own commands are parsed, files of the others are there, what a step rests on comes first."""
    tide = tmp_path / "tide"
    todo = plan.steps(tmp_path, bundle and tmp_path / bundle, tide)
    names = [step.name for step in todo]
    assert len(names) == len(set(names))
    for number, step in enumerate(todo):
        assert set(step.after) <= set(names[:number]), step.name
        program, *arguments = step.command
        if arguments[:2] == ["-m", "tide_export.cli.main"]:
            options = build_parser().parse_args(arguments[2:])
            assert options.command in ("export", "build", "generate", "bench")
        elif program == sys.executable and arguments[0] != "-m":
            assert arguments[0] == "-c" or (ROOT / arguments[0]).is_file()
        for argument in arguments:
            if argument.startswith("tests/"):
                assert (ROOT / argument).exists(), argument
    flavours = {"tensorrt", "tensorrt-rtx"}
    assert {name for name in flavours if any(step.startswith(f"build-{name}-") for step in names)} == flavours
    assert any(step.endswith("-plugins") for step in names)
    assert (f"export-{plan.WEIGHTS[0]}" in names) == (bundle is None)
    weights = "given" if bundle else "fp32"
    for flavour in flavours:  # what one step builds another runs, on engines that a third has built
        builds = next(step for step in todo if step.name == f"cpp-build-{flavour}")
        runs = next(step for step in todo if step.name == f"cpp-{flavour}-{weights}")
        assert set(runs.after) == {builds.name, f"load-{flavour}-{weights}"}
        assert any(argument.startswith(f"{builds.command[2]}/") for argument in runs.command)
        assert flavour in runs.command


def test_without_a_gpu_every_step_on_one_is_skipped(
    session: ModuleType, plan: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "compute_capability", lambda: None)
    needing = [step for step in plan.steps(tmp_path, tmp_path / "b", None) if plan.gpu in step.lacks]
    assert {"cpp-tensorrt-given", "kernel-tests", "kernel-times", "sanitizer", "engine-tests", "cuda-given"} <= {
        step.name for step in needing
    }
    for step in needing:
        passed = {name: session.Result(name, "", session.PASSED, 0.0, []) for name in step.after}
        result = session.run_step(step, tmp_path, passed, 100)
        assert result.outcome.startswith("skipped: "), step.name
        assert "no GPU here" in result.outcome or shutil.which("nvidia-smi") is None
