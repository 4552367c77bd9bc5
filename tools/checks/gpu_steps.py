"""What there is to do on a machine with a GPU, for `gpu_session`: every step, what it rests on and what it needs.

The order is that of value, for a machine that is lent for a quarter of an hour: what provider `cuda` needs and reaches
on a large model (call 1), then what explains it and a regression (call 2), then the rest and all about TensorRT.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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

from tide_export.runtime.native import LIBRARY as LIBRARY_FILE

WEIGHTS = ("fp32", "fp16", "bf16")  # of bundles for TensorRT
CUDA = "cuda-"  # bundles for ONNX Runtime on CUDA, by name; one in int4 is compared with its own graph
CUDA_WEIGHTS = ("bf16", "fp16", "int4")
ROOTS = {"tensorrt": "TENSORRT_ROOT", "tensorrt-rtx": "TENSORRT_RTX_ROOT"}  # variables that name a flavour's headers
DECLARED = ROOT / "tests" / "plugins" / "declared"  # of TensorRT's headers what the plugins use: the same machine code
KERNELS, PLUGINS = "libtide_kernels.so", "libtide_plugins.so"
SHAPES = "shapes"  # folder of bundles without weights, of models as large as people serve, sorted by what counts
SECONDS = {1: 420, 2: 240}  # by call
REST = 3  # the call of what is in none
UNRECORDED = "no more runs are recorded as CUDA graphs"  # the library, where it goes on without
MAX_SECONDS = 300  # of a step: one that hangs leaves others their time
PYTHON = sys.executable
EXPORTING = ("torch", "transformers", "onnxscript", "pydantic", "datasets")  # packages that an export needs
LIBRARY = """
import subprocess, sys
from tide_export.runtime.native import LIBRARY, library
if not LIBRARY.is_file():
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], check=True)
print(library())
"""
DRAFTS = """
import sys
from tide_export import load
from tide_export.bundle.manifest import Drafting
engine = load(sys.argv[1], provider=sys.argv[2])
ones = (1.0,) * len(engine.manifest.checkpoints)
engine = engine.drafting_as(Drafting(ones, 0, 0, ones, (0.0,) * 5, {}, 4, 0.0))  # by the drafter alone, at no cost
given = {"max_new_tokens": 96, "stop_token_ids": []}
full = engine.generate(range(5, 25), mode="full", **given)
found = [engine.generate(range(5, 25), mode="lossless", **given) for _ in range(3)][-1]  # by then runs are replayed
print(found.stats.learned_drafted, "drafted,", found.stats.learned_accepted, "accepted")
sys.exit(0 if found.tokens == full.tokens and found.stats.learned_drafted else "no drafts, or other tokens than full's")
"""
EQUAL = "logits, exits and tokens against the graph on the CPU, and times"
SANITIZERS = {"racecheck": "race", "memcheck": "bad address"}
SANITIZERS |= {"initcheck": "read of what nothing wrote", "synccheck": "barrier that some threads miss"}
PROFILED = "regex:gemv|gemm|nvjet|xmma|cutlass|flash|fmha|attention|xqa"  # kernels of products and attention


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
        call: of a session in two calls, or `REST`.
        spoiled_by: words in the log with which it has failed.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    seconds: int = 300
    after: tuple[str, ...] = ()
    lacks: tuple[Lacks, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    call: int = REST
    spoiled_by: str | None = None


@dataclass(frozen=True)
class Given:
    """What was brought along.

    Attributes:
        bundles: with segment networks, by name, those for CUDA after `CUDA`; the first is in float32, and the others
            are of the same model. Without any the demo model is exported here.
        kernels: `libtide_kernels.so` for this GPU; None: it is compiled here.
        plugins: `libtide_plugins.so`, likewise.
        shapes: networks for CUDA without weights, by name, to time tokens on.
    """

    bundles: Mapping[str, Path]
    kernels: Path | None = None
    plugins: Path | None = None
    shapes: Mapping[str, Path] = field(default_factory=dict)


def steps(folder: Path, given: Given) -> list[Step]:
    """All there is to do, by call."""
    return sorted(_steps(folder, given), key=lambda step: step.call)


def _steps(folder: Path, given: Given) -> list[Step]:
    build = folder / "build"
    kernels, plugins = given.kernels or build / "plugins" / KERNELS, given.plugins or build / "plugins" / PLUGINS
    bundles = dict(given.bundles)
    exported = dict.fromkeys(bundles, ("library",))  # the steps that a bundle rests on
    for_cuda = {name: bundle for name, bundle in bundles.items() if name.startswith(CUDA)}
    compiles = 10 if LIBRARY_FILE.is_file() else MAX_SECONDS
    shows = "bandwidth of a copy, and of cuBLAS at one row of the model's matrices"
    found = [
        Step("gpu", "which GPU and driver", ("nvidia-smi",), 5, (), (program("nvidia-smi"),), call=1),
        Step("packages", "which versions", (PYTHON, "-m", "pip", "freeze"), 10, call=1),
        Step("library", "the runtime's library is there, or compiles", (PYTHON, "-c", LIBRARY), compiles, call=1),
        *(_limits("limits", shows, 25, bundle) for bundle in list((given.shapes or for_cuda).values())[:1]),
        *_kernel_steps(given, build, kernels, plugins),
        _sanitizer_step("racecheck", kernels, 30, 1),
        _kernel_times(kernels, folder),
    ]
    if not bundles:
        names = [*WEIGHTS, *(CUDA + weights for weights in CUDA_WEIGHTS)]
        bundles = {name: folder / f"bundle-{name}" for name in names}
        exported = {name: (f"export-{name}",) for name in names}
        found += [_export_step(name, target) for name, target in bundles.items()]
    reference = next(iter(bundles.values()))
    for name, bundle in [item for item in bundles.items() if item[0].startswith(CUDA)]:
        found += _cuda_steps(name, bundle, bundle if "int4" in name else reference, folder, exported[name])
        del bundles[name]
    found += [*_shape_steps(given.shapes, folder), _limits("switches", "what switch nodes cost that do nothing", 30)]
    for name, bundle in bundles.items():
        found += _network_steps(name, bundle, reference, folder, exported[name])
    in_cpp, times = list[Step](), list[Step]()
    for one in FLAVOURS.values():
        in_cpp += _cpp_build_steps(one.name, folder / f"cpp-{one.name}")
        for name, source in bundles.items():
            for library in (None, plugins) if one.has_plugins else (None,):
                bundle = folder / (f"{one.name}-{name}" + ("-plugins" if library else ""))
                found += _engine_steps(one.name, source, bundle, exported[name], library)
                in_cpp.append(_cpp_step(one.name, bundle, library))
                times += _time_steps(one.name, bundle, library)
    rest = [_sanitizer_step(name, kernels, MAX_SECONDS, REST) for name in list(SANITIZERS)[1:]]
    return [*found, *rest, *_test_steps(plugins), *in_cpp, *times]


def cli(*arguments: object) -> tuple[str, ...]:
    return (PYTHON, "-m", "tide_export.cli.main", *map(str, arguments))


def tool(name: str, *arguments: object) -> tuple[str, ...]:
    return (PYTHON, f"tools/{name}.py", *map(str, arguments))


def tests(*files: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *files)


def _kernel_steps(given: Given, build: Path, kernels: Path, plugins: Path) -> list[Step]:
    """The kernel and the plugin are there, or compile; and the bare kernel is right."""
    code = (
        f"import sys; sys.path.insert(0, 'plugins/capi'); import tide_kernels as tk; "
        f"print('version', tk.VERSION, tk.Kernels({str(kernels)!r}).loaded)"
    )
    opened = f"import ctypes; print(ctypes.CDLL({str(plugins)!r}))"
    native = (program("cmake"), program("nvcc"))
    both = (("kernels", given.kernels, code, "the kernels", 1), ("plugins", given.plugins, opened, "the plugins", REST))
    root = os.environ.get("TENSORRT_ROOT") or DECLARED
    configure = ("cmake", "--preset", "plugins", "-B", str(build), f"-DTENSORRT_ROOT={root}")
    compiling = ("cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 2), "--target")
    made = []
    if given.kernels is None or given.plugins is None:
        made = [Step("configure", "the toolkit is found", configure, 120, (), native, call=1)]
    for name, given_library, check, shows, call in both:
        if given_library is not None:
            made += [Step(name, f"{shows} that were compiled elsewhere load", (PYTHON, "-c", check), 10, call=call)]
        else:
            target = (*compiling, f"tide_{name}")
            made += [Step(name, f"{shows} compile for this GPU", target, MAX_SECONDS, ("configure",), call=call)]
    shows, command = "the kernels equal float64 on this GPU, in CUDA graphs too", tests("tests/gpu/test_kernels_gpu.py")
    library = (("TIDE_KERNELS_LIBRARY", str(kernels)),)
    return [*made, Step("kernel-tests", shows, command, 30, ("kernels",), (gpu,), library, call=1)]


def _kernel_times(kernels: Path, folder: Path) -> Step:
    shows = "kernel times, in a switch body too, against the memory floor and PyTorch"
    times = tool("benchmarks/kernels", kernels, "--slots", "1,8", "--json", folder / "kernels.json")
    return Step("kernel-times", shows, times, 30, ("kernels",), (torch_on_gpu,), call=1)


def _limits(name: str, shows: str, seconds: int, *bundle: Path) -> Step:
    return Step(name, shows, tool("benchmarks/gpu_limits", *bundle), seconds, (), (torch_on_gpu,), call=1)


def _shape_steps(shapes: Mapping[str, Path], folder: Path) -> list[Step]:
    """Large models by provider `cuda`: full depth and exits of the first, exits of the second (int4), full depth of a
    third (another head group); and what the kernels of the first do."""
    found, lacks = list[Step](), (onnxruntime_on_gpu, torch_on_gpu, package("onnx"))
    if shapes:
        few = ("--full-only", "--sequences", "1", "--new-tokens", "4", "--rounds", "1")
        run = tool("benchmarks/gpu_exits", next(iter(shapes.values())), *few)
        which = ("--kernel-name", PROFILED, "--launch-skip", "250", "--launch-count", "16", "--set", "basic")
        profile = ("ncu", "--target-processes", "all", "--clock-control", "none", *which, *run)
        shows, unrecorded = "what bounds the kernels of products and of attention", (("TIDE_CUDA_GRAPHS", "0"),)
        found.append(Step("ncu", shows, profile, 60, ("library",), (program("ncu"), *lacks), unrecorded, call=2))
    kinds = {"full": "at full depth, and its share of the bandwidth", "exits": "by the layers it runs"}

    def add(kind: str, number: int, seconds: int, call: int, *options: str) -> None:
        for name, bundle in list(shapes.items())[number : number + 1]:
            times = tool("benchmarks/gpu_exits", bundle, *options, "--json", folder / f"exits-{name}-{kind}.json")
            shows = f"a token's time {kinds[kind]}, on random weights"
            step = Step(f"{kind}-{name}", shows, times, seconds, ("library",), lacks, call=call)
            found.append(replace(step, spoiled_by=UNRECORDED))

    add("full", 0, 60, 1, "--full-only")
    add("exits", 0, 70, 1)
    add("exits", 1, 50, 1)
    add("full", 2, 40, 2, "--full-only", "--sequences", "1")
    return found


def _export_step(name: str, target: Path) -> Step:
    weights = name.removeprefix(CUDA)
    engine = ("tensorrt", "--no-engines") if name == weights else ("cuda",)
    options = ["--target", *engine, "--overwrite", "--checkpoints", "3,6,9", "--min-layers", "3"]
    options += ["--calibration-samples", "200", "--dataset", "calibration/text/python-stdlib.jsonl"]
    command = cli("export", "demo/demo-llama", "-o", target, "--weights", weights, *options)
    shows = f"the demo model's segment networks for {engine[0]} in {weights}"
    return Step(f"export-{name}", shows, command, MAX_SECONDS, ("library",), tuple(map(package, EXPORTING)), call=1)


def _against(reference: Path, folder: Path, step: str) -> tuple[object, ...]:
    return ("--reference", reference, "--new-tokens", "32", "--rounds", "1", "--json", folder / f"{step}.json")


def _cuda_steps(name: str, bundle: Path, reference: Path, folder: Path, after: tuple[str, ...]) -> list[Step]:
    """Networks for CUDA in ONNX Runtime: what `pip install` gives."""
    if bundle != reference and after != ("library",):
        after = (*after, "export-fp32")
    compared, lacks, every_shape = f"networks-{name}", (onnxruntime_on_gpu,), (("TIDE_CUDA_GRAPHS", "8192"),)
    command = tool("checks/networks", bundle, "cuda", *_against(reference, folder, compared))
    decoding = cli("bench", bundle, "--provider", "cuda", "--json")
    shows = f"ONNX Runtime on CUDA, recorded and replayed: {EQUAL}"
    return [
        Step(compared, shows, command, 20, after, lacks, every_shape, call=1, spoiled_by=UNRECORDED),
        Step(f"decode-{name}", "decode times", decoding, 180, (compared,)),
    ]


def _network_steps(name: str, bundle: Path, reference: Path, folder: Path, after: tuple[str, ...]) -> list[Step]:
    """The segment networks for TensorRT on a GPU without it: in PyTorch."""
    if bundle != reference and after != ("library",):
        after = (*after, "export-fp32")

    shows = EQUAL
    memory = f"the runtime's memory, stream and CUDA graphs, recorded and replayed, with PyTorch in them: {shows}"
    torch, on_torch = f"networks-torch-{name}", (torch_on_gpu, package("onnx"))
    host = f"{torch}-host"
    by_host = ("env", "TIDE_HOST_DECIDES=1", *tool("checks/gpu_torch", bundle, *_against(reference, folder, host)))
    recorded = tool("checks/gpu_torch", bundle, *_against(reference, folder, torch))
    return [
        Step(torch, memory, recorded, 45, after, on_torch, call=2),
        Step(host, f"the same where the host decides after each segment: {shows}", by_host, 180, after, on_torch),
    ]


def _engine_steps(
    flavour_name: str, source: Path, bundle: Path, after: tuple[str, ...], plugins: Path | None
) -> list[Step]:
    """Engines of one flavour, built into a copy of the bundle, compared and run."""
    copy = "import shutil, sys; shutil.rmtree(sys.argv[2], True); shutil.copytree(sys.argv[1], sys.argv[2])"
    name, run = bundle.name, on_engines(flavour_name, plugins)
    copied, built, loaded = (f"copy-{name}",), (f"build-{name}",), (f"load-{name}",)
    copying, after = (PYTHON, "-c", copy, str(source), str(bundle)), (*after, "plugins") if plugins else after
    building = cli("build", bundle, "--target", flavour_name, "--plugins", plugins or "none")
    shows = "plans build here" + (", with the plugin in them" if plugins else "")
    prompt = ("--prompt", "def main(", "--max-new-tokens", "32", "--json")
    comparing = tool("checks/plans", bundle, *((plugins,) if plugins else ()))
    equal = "every engine equals ONNX Runtime in every profile"
    found = [
        Step(copied[0], "", copying, 120, after, (flavour(flavour_name),)),
        Step(built[0], shows, building, MAX_SECONDS, copied),
        Step(loaded[0], "the plans load and run here", cli("generate", bundle, *run, *prompt), 120, built),
        Step(f"compare-{name}", equal, comparing, MAX_SECONDS, built, (package("onnxruntime"),)),
    ]
    if name.endswith("-fp32"):  # where verified drafts give the tokens of one by one to the bit
        drafting = (PYTHON, "-c", DRAFTS, str(bundle), flavour_name)
        shows = "the drafter's engine drafts, and tokens stay full's"
        found.append(Step(f"drafter-{name}", shows, drafting, 120, loaded, (drafter(source),)))
    return found


def _time_steps(flavour_name: str, bundle: Path, plugins: Path | None) -> list[Step]:
    name, run, loaded = bundle.name, on_engines(flavour_name, plugins), (f"load-{bundle.name}",)
    text, result = "calibration/text/python-stdlib-validation.jsonl", bundle.parent / f"batch-{name}.json"
    cases = ("--sizes", "1,2,4,8", "--thresholds", "0.5", "--compactions", "0,1", "--lossless", "0")
    several = tool("benchmarks/batch", bundle, *run, "--dataset", text, *cases, "--new-tokens", 64, "--json", result)
    shows = "tokens a second over the number of sequences, and that each gets its own"
    decoding, on_host = cli("bench", bundle, *run, "--json"), "decode times where the host decides after each segment"
    return [
        Step(f"bench-{name}", "decode times", decoding, 180, loaded),
        Step(f"bench-{name}-host", on_host, ("env", "TIDE_HOST_DECIDES=1", *decoding), 180, loaded),
        Step(f"batch-{name}", shows, several, 240, loaded, (package("tokenizers"),)),
    ]


def drafter(bundle: Path) -> Lacks:
    has = bundle / "segments" / "drafter.onnx"
    return lambda: None if has.is_file() else f"no drafter in {bundle.name}: gpu_carry.py packs one"


def on_engines(flavour_name: str, plugins: Path | None) -> tuple[str, ...]:
    """Options that run plans; of those that hold no plugins none may be named."""
    return ("--provider", flavour_name, *(("--plugins", str(plugins)) if plugins else ()))


def _cpp_build_steps(name: str, build: Path) -> list[Step]:
    """The C++ runtime with one flavour's headers."""
    variable, configure = ROOTS[name], f"cpp-configure-{name}"
    options = {"TIDE_WITH_TENSORRT": "ON", "TENSORRT_ROOT": os.environ.get(variable, "")}
    configuring = ("cmake", "--preset", "runtime", "-B", str(build), *(f"-D{key}={options[key]}" for key in options))
    compiling = ("cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 2))
    found = f"what the C++ runtime needs for {FLAVOURS[name].title} is found"
    return [
        Step(configure, found, configuring, 120, (), (flavour(name), headers(variable), program("cmake"))),
        Step(f"cpp-build-{name}", "it compiles", compiling, MAX_SECONDS, (configure,)),
    ]


def _cpp_step(flavour_name: str, bundle: Path, plugins: Path | None) -> Step:
    run = (str(program_of(bundle.with_name(f"cpp-{flavour_name}"))), str(bundle), "--ids", "5,17,3")
    libs = (("LD_LIBRARY_PATH", libraries(f"{FLAVOURS[flavour_name].module}_libs")),)
    after = (f"load-{bundle.name}", f"cpp-build-{flavour_name}")
    command = (*run, *on_engines(flavour_name, plugins))
    return Step(f"cpp-{bundle.name}", "a program in C++ runs these plans", command, 120, after, (), libs)


def _test_steps(plugins: Path) -> list[Step]:
    exports = tuple(map(package, EXPORTING))
    shows = "plans give the tokens of the branched graph, in every mode, from recorded CUDA graphs too"
    found = []
    for name, chosen in (("tensorrt", "tensorrt and not rtx and not plugins"), ("tensorrt-rtx", "rtx")):
        command = tests("tests/gpu/test_plans.py", "-k", chosen)
        found.append(Step(f"engine-tests-{name}", shows, command, MAX_SECONDS, ("library",), (flavour(name), *exports)))
    command, given = tests("tests/gpu/test_plans.py", "-k", "plugins"), (("TIDE_PLUGINS", str(plugins)),)
    lacks, after = (flavour("tensorrt"), *exports), ("library", "plugins")
    return [*found, Step("engine-tests-plugins", "so do those with plugins", command, MAX_SECONDS, after, lacks, given)]


def _sanitizer_step(name: str, kernels: Path, seconds: int, call: int) -> Step:
    run = (PYTHON, "tests/plugins/kernel_cases.py", str(kernels), "--gpu")
    command = ("compute-sanitizer", "--tool", name, "--error-exitcode", "1", *run)
    shows, lacks = f"no {SANITIZERS[name]} in the kernels", (gpu, program("compute-sanitizer"))
    return Step(f"sanitizer-{name}", shows, command, seconds, ("kernels",), lacks, call=call)


def program_of(build: Path) -> Path:
    return build / "cpp" / "tide_generate"


__all__ = ["FLAVOURS", "KERNELS", "PLUGINS", "ROOT", "Given", "Step", "steps"]
