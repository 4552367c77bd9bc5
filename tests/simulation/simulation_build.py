"""Compiles the simulation: the runtime's sources as one, with assertions, but for what world.cpp replaces."""

import runpy
from collections.abc import Sequence
from pathlib import Path

from native_builds import ROOT, Builds

HERE = Path(__file__).parent
REPLACED = {"machine.cpp", "memory_limit.cpp", "operators.cpp"}  # by world.cpp
LEFT_OUT = runpy.run_path(str(ROOT / "packaging" / "tide_build.py"))["WITH_TENSORRT"]
FLAGS = ("-std=c++17", "-O1", "-Icpp/include", "-Icpp/src", '-DTIDE_EXPORT_VERSION="simulated"', "-Wall", "-Werror")
SIMULATED = ("onnxruntime", "networks")  # the library in place of ONNX Runtime's
PROGRAM = ("world", "requests", "simulate")


def runtime_sources() -> list[Path]:
    found = sorted((ROOT / "cpp" / "src").rglob("*.cpp"))
    return [path for path in found if path.name not in REPLACED | LEFT_OUT and path.parent.name != "capi"]


def build(builds: Builds) -> Path:
    """Returns the program, compiled unless it is in the store already."""
    headers = [path for kind in ("*.h", "*.inc") for path in (ROOT / "cpp").rglob(kind)]
    own = [path for kind in ("*.h", "*.cpp") for path in HERE.glob(kind)]
    needed = [*runtime_sources(), *headers, *own, Path(__file__), ROOT / "cpp" / "ops" / "logits.cpp"]

    def make(folder: Path) -> None:
        unity = folder / "runtime.cpp"
        unity.write_text("".join(f'#include "{path}"\n' for path in runtime_sources()))
        with builds.building("simulation") as run:

            def compile_to(name: str, *arguments: str) -> str:
                run(["g++", *FLAGS, *arguments, "-o", str(folder / name)])
                return str(folder / name)

            def sources(names: Sequence[str]) -> list[str]:
                return [str(HERE / f"{name}.cpp") for name in names]

            compile_to("libtable.so", "-shared", "-fPIC", *sources(SIMULATED))
            objects = [compile_to("runtime.o", "-ffunction-sections", "-c", str(unity))]
            objects += [compile_to("logits.o", "-c", "cpp/ops/logits.cpp")]
            link = ["-Wl,--gc-sections", f"-L{folder}", "-ltable", "-Wl,-rpath,$ORIGIN", "-ldl", "-lpthread"]
            compile_to("simulate", *sources(PROGRAM), *objects, *link)

    return builds.once("simulation-program", sorted(needed), make) / "simulate"
