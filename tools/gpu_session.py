"""Everything that only a GPU can show, in one go: kernels, engines, comparisons and times, into one report folder.

    python tools/gpu_session.py -o FOLDER [--bundle BUNDLE] [--tide FOLDER] [--seconds N] [--only STEP]... [--list]

For a machine that is lent for an hour and of which little is known. Every step is a process of its own with a time
limit and a log; one that fails, hangs or cannot be started is recorded and the others go on, but for those that rest on
it. FOLDER/report.json and FOLDER/report.md are written anew after every step, so that a session that is cut off leaves
what it has seen. What a step lacks (a GPU, a compiler, a package) is its result. `--only` runs some steps again; the
results of the others stay in the report.

Uses what is installed and downloads nothing: the extras `gpu`, `rtx` and `export` for all of it; TENSORRT_ROOT for the
plugin library. `--bundle` names a bundle with segment networks exported elsewhere, in place of exporting the demo model
here. Exit code 1 when a step failed.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tide_export.runtime.flavours import FLAVOURS  # noqa: E402
from tide_export.runtime.gpu import compute_capability  # noqa: E402

PASSED = "passed"
TAIL_LINES = 12
ALL_SKIPPED = re.compile(r"=*\s*\d+ skipped\b(?!.*passed).*")  # pytest's last line
WEIGHTS = ("fp32", "fp16")
Lacks = Callable[[], str | None]


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of the step and its log.
        shows: what its passing shows.
        command: program and arguments, run in the repository.
        seconds: it may take.
        after: steps that must have passed.
        lacks: each says what the machine lacks for it, or None.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    seconds: int = 300
    after: tuple[str, ...] = ()
    lacks: tuple[Lacks, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass
class Result:
    """What became of a step: passed, failed (exit code 1), timed out, skipped: no GPU here."""

    step: str
    shows: str
    outcome: str
    seconds: float
    tail: list[str]


def gpu() -> str | None:
    return None if compute_capability() is not None else "no GPU here"


def program(name: str) -> Lacks:
    return lambda: None if shutil.which(name) else f"no {name} here"


def package(name: str) -> Lacks:
    return lambda: None if importlib.util.find_spec(name) else f"the package {name} is not installed"


def headers() -> str | None:
    root = os.environ.get("TENSORRT_ROOT")
    found = root and (Path(root) / "include" / "NvInfer.h").is_file()
    return None if found else "TENSORRT_ROOT names no folder with include/NvInfer.h"


def steps(folder: Path, bundle: Path | None, tide: Path | None) -> list[Step]:
    """All there is to do, what later steps rest on first, and what matters most before what takes longest."""
    python, build = sys.executable, folder / "build"
    kernels, plugins = (build / "plugins" / f"lib{name}.so" for name in ("tide_kernels", "tide_plugins"))
    native = (program("cmake"), program("nvcc"))
    library = (("TIDE_KERNELS_LIBRARY", str(kernels)),)

    def cli(*arguments: object) -> tuple[str, ...]:
        return (python, "-m", "tide_export.cli", *map(str, arguments))

    def tool(name: str, *arguments: object) -> tuple[str, ...]:
        return (python, f"tools/{name}.py", *map(str, arguments))

    def tests(*files: str) -> tuple[str, ...]:
        return (python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *files)

    found = [
        Step("gpu", "which GPU and driver", ("nvidia-smi",), 30, (), (program("nvidia-smi"),)),
        Step("packages", "which versions", (python, "-m", "pip", "freeze"), 60),
        Step("configure", "the toolkit is found", ("cmake", "--preset", "plugins", "-B", str(build)), 120, (), native),
        Step(
            "kernels",
            "the kernels (and, with TensorRT's headers, the plugins) compile for this GPU",
            ("cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 2)),
            900,
            ("configure",),
        ),
        Step(
            "kernel-tests",
            "the kernels equal float64 on this GPU",
            tests("tests/gpu/test_kernels_gpu.py"),
            600,
            ("kernels",),
            (gpu,),
            library,
        ),
        Step(
            "kernel-times",
            "kernel times against the memory floor, PyTorch and TIDE's own kernels",
            tool("benchmark_kernels", kernels, "--json", folder / "kernels.json", *(("--tide", tide) if tide else ())),
            600,
            ("kernels",),
            (gpu, package("torch")),
        ),
    ]
    source = {weights: folder / f"bundle-{weights}" for weights in WEIGHTS} if bundle is None else {"given": bundle}
    if bundle is None:
        export = [
            "--target",
            "tensorrt-rtx",
            "--no-engines",
            "--overwrite",
            "--checkpoints",
            "3,6,9",
            "--min-layers",
            "3",
        ]
        export += ["--calibration-samples", "200", "--dataset", "calibration/text/python-stdlib.jsonl"]
        found += [
            Step(
                f"export-{weights}",
                f"the demo model's segment networks in {weights}",
                cli("export", "demo/demo-llama", "-o", target, "--weights", weights, *export),
                600,
                (),
                (package("torch"), package("transformers")),
            )
            for weights, target in source.items()
        ]
    for weights, made in source.items():
        exported = (f"export-{weights}",) if bundle is None else ()
        found.append(
            Step(
                f"cuda-{weights}",
                "ONNX Runtime on CUDA runs the segment networks; its times",
                cli("bench", made, "--provider", "cuda", "--json"),
                300,
                exported,
                (gpu, package("onnxruntime")),
            )
        )
        for flavour in FLAVOURS.values():
            for with_plugins in (False, True) if flavour.has_plugins else (False,):
                name = f"{flavour.name}-{weights}" + ("-plugins" if with_plugins else "")
                after = (*exported, "kernels") if with_plugins else exported
                option = ("--plugins", str(plugins)) if with_plugins else ("--plugins", "none")
                lacks: tuple[Lacks, ...] = (package(flavour.module), package("polygraphy"))
                if with_plugins:
                    lacks = (headers, *lacks)
                found += _engine_steps(name, flavour.name, made, folder / name, after, option, lacks, cli, tool)
    return [
        *found,
        Step(
            "engine-tests",
            "engines give the tokens of the branched graph, in every mode",
            tests("tests/gpu/test_engines.py", "-k", "not plugins"),
            900,
            (),
            (gpu, package("torch")),
        ),
        Step(
            "engine-tests-plugins",
            "so do engines with plugins",
            tests("tests/gpu/test_engines.py", "-k", "plugins"),
            900,
            ("kernels",),
            (gpu, headers, package("tensorrt"), package("torch")),
            (("TIDE_PLUGINS", str(plugins)),),
        ),
        Step(
            "plugin-tests",
            "creators, fields and the parser in a registry",
            tests("tests/plugins/test_tensorrt_registry.py"),
            900,
            (),
            (headers, *native, package("tensorrt_rtx"), package("torch")),
        ),
        Step(
            "sanitizer",
            "no bad address, race or read of unwritten memory in the kernels",
            ("sh", "tests/gpu/sanitize.sh", str(kernels)),
            900,
            ("kernels",),
            (gpu, program("compute-sanitizer")),
            (("PYTHON", python),),
        ),
    ]


def _engine_steps(
    name: str,
    flavour: str,
    source: Path,
    bundle: Path,
    after: tuple[str, ...],
    plugins: tuple[str, str],
    lacks: tuple[Lacks, ...],
    cli: Callable[..., tuple[str, ...]],
    tool: Callable[..., tuple[str, ...]],
) -> list[Step]:
    """Engines of one flavour, built into a copy of the bundle, compared, run and timed."""
    copy = "import shutil, sys; shutil.rmtree(sys.argv[2], True); shutil.copytree(sys.argv[1], sys.argv[2])"
    copied, built = (f"copy-{name}",), (f"build-{name}",)
    given = plugins if plugins[1] != "none" else ()  # to run engines that hold none, none may be named
    run = ("--provider", flavour, *given)
    prompt = ("--prompt", "def main(", "--max-new-tokens", "32", "--json")
    text = "calibration/text/python-stdlib-validation.jsonl"
    cases = (
        "--sizes",
        "1,2,4,8",
        "--thresholds",
        "0.5",
        "--compactions",
        "0,1",
        "--lossless",
        "0",
        "--new-tokens",
        "64",
    )
    return [
        Step(copied[0], "", (sys.executable, "-c", copy, str(source), str(bundle)), 120, after, lacks),
        Step(built[0], "engines build here", cli("build", bundle, "--target", flavour, *plugins), 900, copied, lacks),
        Step(
            f"load-{name}", "the engines load and run here", cli("generate", bundle, *run, *prompt), 120, built, (gpu,)
        ),
        Step(
            f"compare-{name}",
            "every engine equals ONNX Runtime in every profile",
            tool("compare_engines", bundle, *given[1:]),
            300,
            built,
            (gpu, package("onnxruntime")),
        ),
        Step(f"bench-{name}", "decode times", cli("bench", bundle, *run, "--json"), 300, (f"load-{name}",), (gpu,)),
        Step(
            f"batch-{name}",
            "tokens a second over the number of sequences, and that each gets its own",
            tool(
                "benchmark_batch",
                bundle,
                *run,
                "--dataset",
                text,
                *cases,
                "--json",
                bundle.parent / f"batch-{name}.json",
            ),
            300,
            (f"load-{name}",),
            (gpu, package("tokenizers")),
        ),
    ]


def run_step(step: Step, folder: Path, before: dict[str, Result], seconds_left: float) -> Result:
    """Runs a step, unless it cannot be; never raises for what the step does."""

    def skipped(reason: str) -> Result:
        return Result(step.name, step.shows, f"skipped: {reason}", 0.0, [])

    for name in step.after:
        if name not in before or before[name].outcome != PASSED:
            return skipped(f"{name} has not passed")
    missing = next((reason for lack in step.lacks if (reason := lack()) is not None), None)
    if missing is not None:
        return skipped(missing)
    if seconds_left <= 0:
        return skipped("no time left")
    started, log = time.perf_counter(), folder / f"{step.name}.log"
    limit = min(step.seconds, seconds_left)
    environment = os.environ | {"PYTHONPATH": str(ROOT), **dict(step.environment)}
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                step.command, cwd=ROOT, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        except OSError as error:
            return Result(step.name, step.shows, f"failed (cannot be started: {error.strerror})", 0.0, [])
        try:
            code = process.wait(timeout=limit)
            outcome = PASSED if code == 0 else f"failed (exit code {code})"
        except subprocess.TimeoutExpired:
            outcome = f"timed out after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has started too, also when we are interrupted
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if outcome == PASSED and lines and ALL_SKIPPED.fullmatch(lines[-1]):
        outcome = "skipped: by all of its tests"
    return Result(step.name, step.shows, outcome, round(time.perf_counter() - started, 1), lines[-TAIL_LINES:])


def write_report(folder: Path, results: Sequence[Result]) -> None:
    """FOLDER/report.json and FOLDER/report.md; each is replaced whole."""
    rows = [f"| {r.step} | {r.outcome} | {r.seconds:g} | {r.shows} |" for r in results]
    ends = [f"## {r.step}: {r.outcome}\n\n```\n" + "\n".join(r.tail) + "\n```" for r in results if r.tail]
    page = "\n".join(["# GPU session", "", "| step | outcome | seconds | shows |", "| --- | --- | --- | --- |", *rows])
    texts = {"report.json": json.dumps([asdict(r) for r in results], indent=2), "report.md": "\n\n".join([page, *ends])}
    for name, text in texts.items():
        temporary = folder / f".{name}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(folder / name)


def earlier(folder: Path) -> dict[str, Result]:
    """The results in a report that is there already."""
    report = folder / "report.json"
    return {entry["step"]: Result(**entry) for entry in json.loads(report.read_text())} if report.is_file() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="for reports, logs, bundles")
    parser.add_argument("--bundle", type=Path, help="with segment networks (the demo model, exported here)")
    parser.add_argument(
        "--tide", type=Path, metavar="FOLDER", help="TIDE's source distribution, for its kernels' times"
    )
    parser.add_argument("--seconds", type=float, default=3600, metavar="N", help="for all steps together (3600)")
    parser.add_argument("--only", action="append", metavar="STEP", help="run these; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    options = parser.parse_args(arguments)
    folder = options.output.resolve()
    todo = steps(folder, options.bundle and options.bundle.resolve(), options.tide and options.tide.resolve())
    unknown = sorted(set(options.only or ()) - {step.name for step in todo})
    if unknown:
        parser.error(f"no step {unknown[0]!r}: see --list")
    if options.list:
        for step in todo:
            print(f"{step.name:32} {' '.join(step.command)}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    results, started = earlier(folder), time.perf_counter()
    for step in todo:
        if options.only and step.name not in options.only:
            continue
        results[step.name] = run_step(step, folder, results, options.seconds - (time.perf_counter() - started))
        write_report(folder, [results[other.name] for other in todo if other.name in results])
        print(f"{step.name:32} {results[step.name].outcome}", flush=True)
    bad = ("failed", "timed out")
    return int(any(result.outcome.startswith(bad) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
