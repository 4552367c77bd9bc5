"""What there is to do on a machine with a GPU, for `gpu_session`: every step, what it rests on and what it needs."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tide_export.runtime.tensorrt.flavours import FLAVOURS  # noqa: E402
from tide_export.runtime.tensorrt.gpu import compute_capability  # noqa: E402

WEIGHTS = ("fp32", "fp16")
ROOTS = {"tensorrt": "TENSORRT_ROOT", "tensorrt-rtx": "TENSORRT_RTX_ROOT"}  # variables that name a flavour's headers
HEADERS = ("ONNXRUNTIME_INCLUDE_DIR", "NLOHMANN_JSON_INCLUDE_DIR")  # and other headers of the C++ runtime's
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


def gpu() -> str | None:
    return None if compute_capability() is not None else "no GPU here"


def program(name: str) -> Lacks:
    return lambda: None if shutil.which(name) else f"no {name} here"


def package(name: str) -> Lacks:
    return lambda: None if importlib.util.find_spec(name) else f"the package {name} is not installed"


def headers(variable: str) -> Lacks:
    def lacks() -> str | None:
        root = os.environ.get(variable)
        found = root and (Path(root) / "include" / "NvInfer.h").is_file()
        return None if found else f"{variable} names no folder with include/NvInfer.h"

    return lacks


def steps(folder: Path, bundle: Path | None, tide: Path | None) -> list[Step]:
    """All there is to do, what later steps rest on first, and what matters most before what takes longest."""
    python, build = sys.executable, folder / "build"
    kernels, plugins = (build / "plugins" / f"lib{name}.so" for name in ("tide_kernels", "tide_plugins"))
    native = (program("cmake"), program("nvcc"))
    library = (("TIDE_KERNELS_LIBRARY", str(kernels)),)

    def cli(*arguments: object) -> tuple[str, ...]:
        return (python, "-m", "tide_export.cli.main", *map(str, arguments))

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
            tool("benchmarks/kernels", kernels, "--json", folder / "kernels.json", *(("--tide", tide) if tide else ())),
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
    for flavour in FLAVOURS.values():
        found += _cpp_build_steps(flavour.name, build.with_name(f"cpp-{flavour.name}"))
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
                    lacks = (headers("TENSORRT_ROOT"), *lacks)
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
            (gpu, headers("TENSORRT_ROOT"), package("tensorrt"), package("torch")),
            (("TIDE_PLUGINS", str(plugins)),),
        ),
        Step(
            "plugin-tests",
            "creators, fields and the parser in a registry",
            tests("tests/plugins/test_tensorrt_registry.py"),
            900,
            (),
            (headers("TENSORRT_ROOT"), *native, package("tensorrt_rtx"), package("torch")),
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
            tool("checks/engines", bundle, *given[1:]),
            300,
            built,
            (gpu, package("onnxruntime")),
        ),
        Step(f"bench-{name}", "decode times", cli("bench", bundle, *run, "--json"), 300, (f"load-{name}",), (gpu,)),
        Step(
            f"batch-{name}",
            "tokens a second over the number of sequences, and that each gets its own",
            tool(
                "benchmarks/batch",
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
        Step(
            f"cpp-{name}",
            "the C++ runtime on these engines gives Python's tokens, exit layers and counts; its times",
            tool("checks/cpp_runtime", bundle, program_of(bundle.with_name(f"cpp-{flavour}")), *run),
            300,
            (f"load-{name}", f"cpp-build-{flavour}"),
            (gpu, package("tokenizers")),
            (("LD_LIBRARY_PATH", libraries(f"{FLAVOURS[flavour].module}_libs")),),
        ),
    ]


def _cpp_build_steps(flavour: str, build: Path) -> list[Step]:
    """The C++ runtime with one flavour's headers."""
    variable, configure = ROOTS[flavour], f"cpp-configure-{flavour}"
    library = next(Path(package_folder("onnxruntime")).glob("capi/libonnxruntime.so.*"), "")
    options = {"TENSORRT_ROOT": os.environ.get(variable, ""), "ONNXRUNTIME_LIBRARY": library}
    options |= {name: os.environ[name] for name in HEADERS if name in os.environ}
    given = [f"-D{name}={value}" for name, value in {"TIDE_WITH_TENSORRT": "ON", **options}.items()]
    lacks = (program("cmake"), headers(variable), package("onnxruntime"))
    return [
        Step(
            configure,
            f"what the C++ runtime needs for {FLAVOURS[flavour].title} is found",
            ("cmake", "--preset", "runtime", "-B", str(build), *given),
            120,
            (),
            lacks,
        ),
        Step(
            f"cpp-build-{flavour}",
            "it compiles",
            ("cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 2)),
            600,
            (configure,),
        ),
    ]


def program_of(build: Path) -> Path:
    return build / "cpp" / "tide_generate"


def package_folder(module: str) -> str:
    """Of an installed package, or nothing."""
    spec = importlib.util.find_spec(module)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else ""


def libraries(module: str) -> str:
    """LD_LIBRARY_PATH with a package of libraries."""
    return ":".join(path for path in (package_folder(module), os.environ.get("LD_LIBRARY_PATH", "")) if path)
