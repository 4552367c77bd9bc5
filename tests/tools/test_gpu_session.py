"""`tools/checks/gpu_session.py`: whatever a step does, the others run, and the report and the page of measurements say
what became of each; a session that is cut off goes on where it ended."""

import json
import os
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import pytest

from tide_export.cli.options import build_parser

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(session: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs steps in a folder; gives the exit code and the report's results by step."""

    def go(todo: list, *options: str) -> tuple[int, dict]:
        monkeypatch.setattr(session, "steps", lambda *args: todo)
        code = session.main(["-o", str(tmp_path / "out"), *options])
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["machine"]["versions"].startswith("Python ")
        return code, {entry["step"]: entry for entry in report["results"]}

    return go


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def outcomes(found: dict) -> dict[str, str]:
    return {name: entry["outcome"] for name, entry in found.items()}


def test_a_step_that_goes_wrong_does_not_stop_the_others(session: ModuleType, run, tmp_path: Path) -> None:
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
    code, found = run(todo)
    assert code == 1
    assert outcomes(found) == {
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
    code, found = run(todo, "--only", "bad", "--only", "rests")
    again = outcomes(found)
    assert (code, again["bad"], again["rests"], again["crash"]) == (1, "passed", "passed", "failed (exit code -6)")


def test_a_session_that_is_out_of_time_says_so_and_goes_on_later(session: ModuleType, run, tmp_path: Path) -> None:
    once = f"import pathlib, time; f = pathlib.Path({str(tmp_path / 'ran')!r}); f.write_text(f.read_text() + 'x')"
    (tmp_path / "ran").write_text("")
    slow = f"import pathlib, time; time.sleep(0 if pathlib.Path({str(tmp_path / 'later')!r}).exists() else 60)"
    todo = [
        session.Step("once", "", script(once)),
        session.Step("bad", "", script("raise SystemExit(1)")),
        session.Step("long", "", script(slow)),
        session.Step("late", "", script("")),
    ]
    started = time.monotonic()
    code, found = run(todo, "--seconds", "1.5")
    assert (code, time.monotonic() - started < 20) == (1, True)
    assert found["long"]["outcome"].startswith("cut off after ")
    assert found["late"]["outcome"] == "skipped: no time left"
    (tmp_path / "later").touch()
    code, found = run(todo, "--resume")
    assert outcomes(found) == {"once": "passed", "bad": "failed (exit code 1)", "long": "passed", "late": "passed"}
    assert (tmp_path / "ran").read_text() == "x"


def test_a_step_that_ends_the_session_is_run_once_more_and_last(session: ModuleType, run, tmp_path: Path) -> None:
    order = tmp_path / "order"
    order.write_text("")

    def step(name: str, *after: str) -> object:
        return session.Step(name, "", script(f"open({str(order)!r}, 'a').write('{name} ')"), after=after)

    kills = session.Step(
        "kills", "", script(f"open({str(order)!r}, 'a').write('kills '); import os; os.kill(os.getppid(), 9)")
    )
    todo = [step("first"), kills, step("rests", "kills"), step("other")]
    child = os.fork()
    if child == 0:
        run(todo)
        os._exit(0)
    os.waitpid(child, 0)
    report = {entry["step"]: entry for entry in json.loads((tmp_path / "out" / "report.json").read_text())["results"]}
    assert outcomes(report) == {"first": "passed", "kills": "started"}
    child = os.fork()
    if child == 0:
        run(todo, "--resume")
        os._exit(0)
    os.waitpid(child, 0)
    assert order.read_text() == "first kills other kills "
    code, found = run(todo, "--resume")
    assert code == 1
    assert outcomes(found) == {
        "first": "passed",
        "kills": "failed (the session ended in it, twice)",
        "rests": "skipped: kills has not passed",
        "other": "passed",
    }
    assert order.read_text() == "first kills other kills "


def test_what_was_brought_along_is_found_and_kept(
    session: ModuleType, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/brought/along")
    _, found = run([session.Step("paths", "", script("import sys; print(sys.path[1:3])"))])
    assert found["paths"]["tail"] == [str([str(ROOT), "/brought/along"])]
    carried = tmp_path / "carried"
    for name in ("bf16", "fp32"):
        (carried / "bundles" / name).mkdir(parents=True)
    (carried / "libtide_kernels.so").touch()
    given = session.brought(session.parsed(["-o", "x", "--carried", str(carried)]))
    assert list(given.bundles) == ["fp32", "bf16"]
    assert (given.kernels, given.plugins) == (carried / "libtide_kernels.so", None)
    (carried / "libtide_plugins.so").touch()
    given = session.brought(session.parsed(["-o", "x", "--carried", str(carried), "--kernels", "mine.so"]))
    assert (given.kernels, given.plugins) == (Path("mine.so").resolve(), carried / "libtide_plugins.so")


def test_archive_and_page_are_written_with_every_step(session: ModuleType, run, tmp_path: Path) -> None:
    archive, page = tmp_path / "session.tgz", tmp_path / "gpu.md"
    figures = {
        "engine": "cuda", "precision": "bf16", "wrong": ["step 3: logits"],
        "steps": {"steps": 7, "largest": 0.01},
        "rows": [
            {"mode": "full", "sequences": 1, "equal": 9, "alone": 8, "tokens": 9, "speeds": {"cuda": 12.34, "x": 5}}
        ],
    }  # fmt: skip
    folder = tmp_path / "out"
    early = str(folder / "early.tgz")
    todo = [
        session.Step(
            "networks-cuda-bf16",
            "y",
            script(f"import shutil; shutil.copy({str(archive)!r}, {str(folder / 'early.tgz')!r})"),
        ),
        session.Step("gone", "z", script(""), lacks=(lambda: "no abacus here",)),
        session.Step("rests", "z", script(""), after=("gone",)),
    ]
    folder.mkdir()
    (folder / "networks-cuda-bf16.json").write_text(json.dumps(figures))
    (folder / "kernels.json").write_text(json.dumps({"gpu": "X", "times": [{"step": "exit", "ours": 1.234}]}))
    code, _ = run(todo, "--archive", str(archive), "--page", str(page))
    assert code == 0
    with tarfile.open(early) as first:
        started = json.load(first.extractfile("report.json"))["results"]
        assert [(entry["step"], entry["outcome"]) for entry in started] == [("networks-cuda-bf16", "started")]
    with tarfile.open(archive) as last:
        assert {"report.json", "report.md", "networks-cuda-bf16.log", "kernels.json"} <= set(last.getnames())
    text = page.read_text()
    assert "| gone | skipped: no abacus here | 0 | z |" in text
    assert "1 more steps rest on steps that have not passed." in text
    assert "| cuda, bf16 | full | 1 | 12.3 | x 5.0 | 9 / 8 of 9 |" in text
    assert "**differs: step 3: logits**" in text
    assert "| exit | 1.23 |" in text
    assert ("**Nothing has run on a GPU yet.**" in text) == (
        json.loads((folder / "report.json").read_text())["machine"]["gpu"] == "none"
    )


def carried(plan: ModuleType, folder: Path):
    """What `gpu_carry.py` packs with three shapes."""
    bundles = [*plan.WEIGHTS, *(plan.CUDA + weights for weights in plan.CUDA_WEIGHTS)]
    shapes = ("0-3b-bf16", "1-3b-int4", "2-3b-group4")
    named = [{name: folder / name for name in names} for names in (bundles, shapes)]
    return plan.Given(named[0], folder / "kernels.so", folder / "plugins.so", named[1])


def test_two_calls_hold_what_counts_in_its_order(plan: ModuleType, tmp_path: Path) -> None:
    """That a session's minutes are enough where every step takes all it may; nothing of TensorRT is in a call."""
    todo = plan.steps(tmp_path, carried(plan, tmp_path))
    by_call = {call: [step for step in todo if step.call == call] for call in (1, 2, plan.REST)}
    assert [step.name for step in by_call[1]] == [
        *("gpu", "packages", "library", "limits", "kernels", "kernel-tests", "sanitizer-racecheck", "kernel-times"),
        *("networks-cuda-bf16", "networks-cuda-fp16", "networks-cuda-int4", "full-0-3b-bf16", "exits-0-3b-bf16"),
        *("exits-1-3b-int4", "switches"),
    ]
    names = ["ncu", "full-2-3b-group4", *(f"networks-torch-{weights}" for weights in ("fp32", "fp16", "bf16"))]
    assert [step.name for step in by_call[2]] == names
    assert [step.call for step in todo] == sorted(step.call for step in todo)
    for call, seconds in {1: 420, 2: 240}.items():
        assert sum(step.seconds for step in by_call[call]) <= seconds == plan.SECONDS[call]
        assert not any("tensorrt" in " ".join((step.name, *step.command)) for step in by_call[call])
    timed = [step for step in todo if step.name.startswith(("full-", "exits-", "networks-cuda-"))]
    assert {step.spoiled_by for step in timed} == {"no more runs are recorded as CUDA graphs"}
    assert plan.UNRECORDED in (ROOT / "cpp" / "src" / "onnxruntime" / "segments.cpp").read_text()


def test_the_second_call_takes_what_has_not_passed_first(session: ModuleType, run, tmp_path: Path) -> None:
    flag = tmp_path / "mended"
    mended = script(f"import pathlib, sys; sys.exit(not pathlib.Path({str(flag)!r}).exists())")
    todo = [
        session.Step("good", "", script("pass"), call=1),
        session.Step("bad", "", mended, call=1),
        session.Step("rests", "", script("pass"), after=("bad",), call=1),
        session.Step("plain", "", script("print('said: no more runs')"), call=1, spoiled_by="no more runs"),
        session.Step("second", "", script("pass"), call=2),
        session.Step("rest", "", script("raise SystemExit(1)")),
    ]
    code, found = run(todo, "--call", "1")
    expected = {"good": "passed", "bad": "failed (exit code 1)", "rests": "skipped: bad has not passed"}
    assert (code, outcomes(found)) == (1, expected | {"plain": "failed (no more runs)"})
    flag.touch()
    todo[3] = session.Step("plain", "", script("pass"), call=1, spoiled_by="no more runs")
    (tmp_path / "out" / "good.log").unlink()
    code, found = run(todo, "--call", "2")
    assert (code, outcomes(found)) == (0, dict.fromkeys(("good", "bad", "rests", "plain", "second"), "passed"))
    assert not (tmp_path / "out" / "good.log").exists(), "what has passed is not run again"
    code, found = run(todo, "--call", "2", "--seconds", "0")
    assert found["second"]["outcome"] == "skipped: no time left"


@pytest.mark.parametrize("brought", [False, True])
def test_every_command_is_one_that_exists(plan: ModuleType, tmp_path: Path, brought: bool) -> None:
    """Options of our own commands are parsed, files of the others are there, what a step rests on comes first, and no
    step takes longer than a machine may be lent for."""
    todo = plan.steps(tmp_path, carried(plan, tmp_path) if brought else plan.Given({}))
    names = [step.name for step in todo]
    assert len(names) == len(set(names))
    for number, step in enumerate(todo):
        assert set(step.after) <= set(names[:number]), step.name
        assert step.seconds <= plan.MAX_SECONDS == 300
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
    assert ("export-fp32" in names) == ("configure" in names) == (not brought)
    for flavour in flavours:  # what one step builds another runs, on engines that a third has built
        builds = next(step for step in todo if step.name == f"cpp-build-{flavour}")
        runs = next(step for step in todo if step.name == f"cpp-{flavour}-fp32")
        assert set(runs.after) == {builds.name, f"load-{flavour}-fp32"}
        assert any(argument.startswith(f"{builds.command[2]}/") for argument in runs.command)
        assert flavour in runs.command


def test_a_step_is_skipped_for_what_the_machine_really_lacks(plan: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = sys.modules["gpu_machine"]
    monkeypatch.setattr(machine, "package", lambda name: lambda: None)  # all is installed
    monkeypatch.setattr(machine, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(machine, "asked", lambda *lines: None)
    assert machine.flavour("tensorrt-rtx")() == "TensorRT for RTX runs on no GPU of compute capability 9.0"
    assert machine.flavour("tensorrt")() is machine.torch_on_gpu() is machine.onnxruntime_on_gpu() is None
    monkeypatch.setattr(machine, "compute_capability", lambda: (8, 9))
    assert machine.flavour("tensorrt-rtx")() is None
    monkeypatch.setattr(machine, "compute_capability", lambda: None)
    for check in (machine.flavour("tensorrt-rtx"), machine.torch_on_gpu, machine.onnxruntime_on_gpu, machine.gpu):
        assert check() == "no GPU here"
    monkeypatch.undo()
    assert machine.package("no_such_package")() == "the package no_such_package is not installed"
    assert (
        machine.asked("import sys; sys.exit('onnxruntime is the build for the CPU')")
        == "onnxruntime is the build for the CPU"
    )


def test_without_a_gpu_every_step_on_one_is_skipped(
    session: ModuleType, plan: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(sys.modules["gpu_machine"], "compute_capability", lambda: None)
    given = plan.Given({"fp32": tmp_path / "b"}, tmp_path / "kernels.so", tmp_path / "plugins.so")
    words = ("kernel-t", "networks-", "drafter-", "engine-tests", "sanitizer")
    words += ("build-tensorrt", "load-", "bench-", "compare-")
    results = {}
    for step in plan.steps(tmp_path, given):
        reason = session.why_not(step, results, 100)
        outcome = session.PASSED if reason is None else f"skipped: {reason}"
        results[step.name] = session.Result(step.name, "", outcome, 0.0, [])
    assert results["kernels"].outcome == results["plugins"].outcome == session.PASSED
    of_gpu = {name: result.outcome for name, result in results.items() if name.startswith(words)}
    assert len(of_gpu) > 20
    assert session.PASSED not in of_gpu.values()
    assert (
        of_gpu["kernel-times"]
        == of_gpu["kernel-tests"]
        == of_gpu["engine-tests-tensorrt-rtx"]
        == "skipped: no GPU here"
    )
