"""What there is to do on a machine with a GPU, for `gpu_session`: every step, what it rests on and what it needs."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_machine import (
    FLAVOURS,
    ROOT,
    Lacks,
    flavour,
    gpu,
    headers,
    libraries,
    onnxruntime_on_gpu,
    package,
    program,
    torch_on_gpu,
)

WEIGHTS = ("fp32", "fp16", "bf16")
ROOTS = {"tensorrt": "TENSORRT_ROOT", "tensorrt-rtx": "TENSORRT_RTX_ROOT"}  # variables that name a flavour's headers
MAX_SECONDS = 540  # of a step: who lends a machine for so many minutes a command gets every step whole
PYTHON = sys.executable
LIBRARY = """
import subprocess, sys
from tide_export.runtime.native import LIBRARY, library
if not LIBRARY.is_file():
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], check=True)
print(library())
"""
SANITIZERS = {
    "memcheck": "bad address",
    "racecheck": "race",
    "initcheck": "read of what nothing wrote",
    "synccheck": "barrier that some threads miss",
}


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


@dataclass(frozen=True)
class Given:
    """What was brought along.

    Attributes:
        bundles: with segment networks, by name; the first is in float32, and the others are of the same model. Without
            any the demo model is exported here.
        kernels: `libtide_kernels.so` for this GPU; None: it is compiled here.
        tide: TIDE's source distribution.
    """

    bundles: Mapping[str, Path]
    kernels: Path | None = None
    tide: Path | None = None


def steps(folder: Path, given: Given) -> list[Step]:
    """All there is to do: what later steps rest on first, what matters most before what takes longest."""
    build = folder / "build"
    kernels = given.kernels or build / "plugins" / "libtide_kernels.so"
    plugins = build / "plugins" / "libtide_plugins.so"
    bundles, exported = dict(given.bundles), dict[str, tuple[str, ...]]()  # the latter: steps they rest on
    found = [
        Step("gpu", "which GPU and driver", ("nvidia-smi",), 30, (), (program("nvidia-smi"),)),
        Step("packages", "which versions", (PYTHON, "-m", "pip", "freeze"), 60),
        Step("library", "the runtime's library is there, or compiles", (PYTHON, "-c", LIBRARY), MAX_SECONDS),
        *_kernel_steps(given, kernels, folder),
    ]
    if not bundles:
        bundles = {weights: folder / f"bundle-{weights}" for weights in WEIGHTS}
        exported = {weights: (f"export-{weights}",) for weights in WEIGHTS}
        found += [_export_step(weights, target) for weights, target in bundles.items()]
    reference = next(iter(bundles.values()))
    for name, bundle in bundles.items():
        found += _cuda_steps(name, bundle, reference, folder, exported.get(name, ("library",)))
    found += _plugin_build_steps(build)
    for one in FLAVOURS.values():
        found += _cpp_build_steps(one.name, build.with_name(f"cpp-{one.name}"))
        for bundle_name, bundle in bundles.items():
            for library in (None, plugins) if one.has_plugins else (None,):
                name = f"{one.name}-{bundle_name}" + ("-plugins" if library else "")
                found += _engine_steps(
                    name, one.name, bundle, folder / name, exported.get(bundle_name, ("library",)), library
                )
    return [*found, *_test_steps(plugins), *_sanitizer_steps(kernels)]


def cli(*arguments: object) -> tuple[str, ...]:
    return (PYTHON, "-m", "tide_export.cli.main", *map(str, arguments))


def tool(name: str, *arguments: object) -> tuple[str, ...]:
    return (PYTHON, f"tools/{name}.py", *map(str, arguments))


def tests(*files: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *files)


def _kernel_steps(given: Given, kernels: Path, folder: Path) -> list[Step]:
    code = (
        f"import sys; sys.path.insert(0, 'plugins/capi'); import tide_kernels as tk; "
        f"print('version', tk.VERSION, tk.Kernels({str(kernels)!r}).loaded)"
    )
    if given.kernels is not None:
        made = [Step("kernels", "the kernels that were compiled elsewhere load", (PYTHON, "-c", code), 60)]
    else:
        build = kernels.parents[1]
        native = (program("cmake"), program("nvcc"))
        made = [
            Step(
                "configure",
                "the toolkit is found",
                ("cmake", "--preset", "plugins", "-B", str(build), "-DTENSORRT_ROOT="),
                120,
                (),
                native,
            ),
            Step(
                "kernels",
                "the kernels compile for this GPU",
                ("cmake", "--build", str(build), "--target", "tide_kernels", "--parallel", str(os.cpu_count() or 2)),
                MAX_SECONDS,
                ("configure",),
            ),
        ]
    times = tool("benchmarks/kernels", kernels, "--json", folder / "kernels.json")
    return [
        *made,
        Step(
            "kernel-tests",
            "the kernels equal float64 on this GPU",
            tests("tests/gpu/test_kernels_gpu.py"),
            MAX_SECONDS,
            ("kernels",),
            (gpu,),
            (("TIDE_KERNELS_LIBRARY", str(kernels)),),
        ),
        Step(
            "kernel-times",
            "kernel times against the memory floor, PyTorch and TIDE's own kernels",
            (*times, *(("--tide", str(given.tide)) if given.tide else ())),
            MAX_SECONDS,
            ("kernels",),
            (torch_on_gpu,),
        ),
    ]


def _export_step(weights: str, target: Path) -> Step:
    options = ["--target", "tensorrt", "--no-engines", "--overwrite", "--checkpoints", "3,6,9", "--min-layers", "3"]
    options += ["--calibration-samples", "200", "--dataset", "calibration/text/python-stdlib.jsonl"]
    return Step(
        f"export-{weights}",
        f"the demo model's segment networks in {weights}",
        cli("export", "demo/demo-llama", "-o", target, "--weights", weights, *options),
        MAX_SECONDS,
        ("library",),
        tuple(package(name) for name in ("torch", "transformers", "onnxscript", "pydantic", "datasets")),
    )


def _cuda_steps(name: str, bundle: Path, reference: Path, folder: Path, after: tuple[str, ...]) -> list[Step]:
    """The segment networks in ONNX Runtime on CUDA."""
    step = f"networks-cuda-{name}"
    given = ("cuda", "--reference", reference, "--new-tokens", "128", "--json", folder / f"{step}.json")
    if bundle != reference and after != ("library",):
        after = (*after, "export-fp32")
    return [
        Step(
            step,
            "ONNX Runtime on CUDA: logits, exits and tokens against the graph on the CPU, and times",
            tool("checks/networks", bundle, *given),
            MAX_SECONDS,
            after,
            (onnxruntime_on_gpu,),
        ),
        Step(
            f"cuda-{name}",
            "ONNX Runtime on CUDA: decode times",
            cli("bench", bundle, "--provider", "cuda", "--json"),
            300,
            after,
            (onnxruntime_on_gpu,),
        ),
    ]


def _plugin_build_steps(build: Path) -> list[Step]:
    needs = (headers("TENSORRT_ROOT"), program("cmake"), program("nvcc"))
    return [
        Step(
            "configure-plugins",
            "TensorRT's headers are found",
            ("cmake", "--preset", "plugins", "-B", str(build)),
            120,
            (),
            needs,
        ),
        Step(
            "plugins",
            "the plugins compile for this GPU",
            ("cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 2)),
            MAX_SECONDS,
            ("configure-plugins",),
        ),
    ]


def _engine_steps(
    name: str, flavour_name: str, source: Path, bundle: Path, after: tuple[str, ...], plugins: Path | None
) -> list[Step]:
    """Engines of one flavour, built into a copy of the bundle, compared, run and timed."""
    copy = "import shutil, sys; shutil.rmtree(sys.argv[2], True); shutil.copytree(sys.argv[1], sys.argv[2])"
    copied, built, loaded = (f"copy-{name}",), (f"build-{name}",), (f"load-{name}",)
    lacks: tuple[Lacks, ...] = (flavour(flavour_name),)
    given = ("--plugins", str(plugins)) if plugins else ()  # to run engines that hold none, none may be named
    run = ("--provider", flavour_name, *given)
    prompt = ("--prompt", "def main(", "--max-new-tokens", "32", "--json")
    text = "calibration/text/python-stdlib-validation.jsonl"
    cases = [
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
    ]
    times = ("--json", bundle.parent / f"batch-{name}.json")
    return [
        Step(
            copied[0],
            "",
            (PYTHON, "-c", copy, str(source), str(bundle)),
            120,
            (*after, "plugins") if plugins else after,
            lacks,
        ),
        Step(
            built[0],
            "engines build here",
            cli("build", bundle, "--target", flavour_name, "--plugins", plugins or "none"),
            MAX_SECONDS,
            copied,
        ),
        Step(loaded[0], "the engines load and run here", cli("generate", bundle, *run, *prompt), 120, built),
        Step(
            f"compare-{name}",
            "every engine equals ONNX Runtime in every profile",
            tool("checks/engines", bundle, *given[1:]),
            300,
            built,
            (package("onnxruntime"),),
        ),
        Step(f"bench-{name}", "decode times", cli("bench", bundle, *run, "--json"), 300, loaded),
        Step(
            f"batch-{name}",
            "tokens a second over the number of sequences, and that each gets its own",
            tool("benchmarks/batch", bundle, *run, "--dataset", text, *cases, *times),
            300,
            loaded,
            (package("tokenizers"),),
        ),
        Step(
            f"cpp-{name}",
            "a program in C++ runs these engines",
            (str(program_of(bundle.with_name(f"cpp-{flavour_name}"))), str(bundle), "--ids", "5,17,3", *run),
            300,
            (*loaded, f"cpp-build-{flavour_name}"),
            (),
            (("LD_LIBRARY_PATH", libraries(f"{FLAVOURS[flavour_name].module}_libs")),),
        ),
    ]


def _cpp_build_steps(name: str, build: Path) -> list[Step]:
    """The C++ runtime with one flavour's headers."""
    variable, configure = ROOTS[name], f"cpp-configure-{name}"
    options = {"TIDE_WITH_TENSORRT": "ON", "TENSORRT_ROOT": os.environ.get(variable, "")}
    given = [f"-D{name}={value}" for name, value in options.items()]
    return [
        Step(
            configure,
            f"what the C++ runtime needs for {FLAVOURS[name].title} is found",
            ("cmake", "--preset", "runtime", "-B", str(build), *given),
            120,
            (),
            (flavour(name), program("cmake"), headers(variable)),
        ),
        Step(
            f"cpp-build-{name}",
            "it compiles",
            ("cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 2)),
            MAX_SECONDS,
            (configure,),
        ),
    ]


def _test_steps(plugins: Path) -> list[Step]:
    exports = tuple(package(name) for name in ("torch", "transformers", "onnxscript", "pydantic", "datasets"))
    engines = tests("tests/gpu/test_engines.py", "-k")
    shows = "engines give the tokens of the branched graph, in every mode"
    return [
        *(
            Step(
                f"engine-tests-{name}", shows, (*engines, chosen), MAX_SECONDS, ("library",), (flavour(name), *exports)
            )
            for name, chosen in (("tensorrt", "tensorrt and not rtx and not plugins"), ("tensorrt-rtx", "rtx"))
        ),
        Step(
            "engine-tests-plugins",
            "so do engines with plugins",
            (*engines, "plugins"),
            MAX_SECONDS,
            ("library", "plugins"),
            (flavour("tensorrt"), *exports),
            (("TIDE_PLUGINS", str(plugins)),),
        ),
    ]


def _sanitizer_steps(kernels: Path) -> list[Step]:
    run = (PYTHON, "tests/plugins/kernel_cases.py", str(kernels), "--gpu")
    return [
        Step(
            f"sanitizer-{name}",
            f"no {finds} in the kernels",
            ("compute-sanitizer", "--tool", name, "--error-exitcode", "1", *run),
            MAX_SECONDS,
            ("kernels",),
            (gpu, program("compute-sanitizer")),
        )
        for name, finds in SANITIZERS.items()
    ]


def program_of(build: Path) -> Path:
    return build / "cpp" / "tide_generate"


__all__ = ["FLAVOURS", "ROOT", "Given", "Step", "steps"]
