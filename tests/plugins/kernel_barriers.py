"""Finds every barrier of the kernel's sources, and builds the kernel so that a run can do without any one of them.

The sources are copied and changed line by line: a statement that waits, counts or orders becomes one that may be left
out, and a phase says which it is before the barrier at its end (`fibres/include/fibres.h`).
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from native_builds import ROOT, Builds

FIBRES = Path(__file__).parent / "fibres"
CAPI = ROOT / "plugins" / "capi" / "tide_kernels.cpp"
COMPILER = ("g++", "-std=c++17", "-g1", "-fPIC", "-DTIDE_EMULATED", "-Wall", "-Wextra", "-Werror")
COMPILER += ("-Wno-unknown-pragmas", "-Wno-unused-parameter", f"-I{FIBRES}/include", f"-I{FIBRES}")
WAITS = r"[Ss]ync|[Bb]arrier|[Ff]ence|[Aa]rrive|[Ww]ait|__shfl|[Aa]tomic"
STATEMENT = re.compile(rf"^\s*(?!//)[^;{{}}/]*\b\w*(?:{WAITS})\w*\([^;{{}}]*\);$")
END = re.compile(r"\b(\w+)\.phase\(")
OTHER = re.compile(rf"\w*(?:{WAITS})\w*\(|\basm\b|griddepcontrol")


@dataclass(frozen=True)
class Barrier:
    """One of them, by its number from 1 on."""

    number: int
    file: str
    line: int
    code: str  # and the next line

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.code}"


def sources() -> list[Path]:
    """All that a kernel is made of."""
    return sorted(path for path in (ROOT / "plugins").rglob("*.cu*") if path.suffix in (".cu", ".cuh"))


def mark(found: list[Barrier], path: Path) -> str:
    """The source with its barriers, which are added to `found`, marked."""
    lines = path.read_text().splitlines()
    for index, line in enumerate(lines):
        if not (STATEMENT.match(line) or (END.search(line) and not line.lstrip().startswith("//"))):
            continue
        number = len(found) + 1
        end = " ".join(each.strip() for each in lines[index : index + 2])
        found.append(Barrier(number, path.name, index + 1, end))
        if STATEMENT.match(line):
            lines[index] = f"if (fibres::kept({number})) {line.strip()}"
        else:
            lines[index] = END.sub(rf"(fibres::ends_phase({number}), \1).phase(", line)
    return "\n".join(lines) + "\n"


def barriers() -> list[Barrier]:
    """Every barrier, in the order of the sources."""
    found: list[Barrier] = []
    for path in sources():
        mark(found, path)
    return found


def unknown() -> list[str]:
    """Lines that may wait or order and that `barriers` does not know how to leave out."""
    code = [line.split("//")[0].strip() for path in sources() for line in path.read_text().splitlines()]
    return [line for line in code if OTHER.search(line) and not STATEMENT.match(line)]


def build(builds: Builds) -> Path:
    """Compiles the kernel with its barriers marked; returns the library."""

    def compile_marked(folder: Path) -> None:
        found: list[Barrier] = []
        for path in sources():
            target = folder / path.relative_to(ROOT / "plugins")
            marked = mark(found, path)
            if path.name != "device.cuh":  # the fibres have their own
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(marked)
        library = folder / "libtide_kernels.so"
        compile_observed(folder / "tide_exit" / "kernel.cu", library, observers(builds), f"-I{folder}")

    return builds.once("barriers", made_of(), compile_marked) / "libtide_kernels.so"


def build_faulty(builds: Builds) -> Path:
    """Compiles `fibres/faulty.cu`, with fibres that change as on other processors."""

    def compile_faulty(folder: Path) -> None:
        fibres = folder / "fibres.o"
        run([*COMPILER, "-DFIBRES_UCONTEXT", "-O2", "-c", FIBRES / "fibres.cpp", "-o", fibres])
        others = [one for one in observers(builds) if one.name != fibres.name]
        compile_observed(FIBRES / "faulty.cu", folder / "libfaulty.so", [fibres, *others])

    return builds.once("faulty", made_of(), compile_faulty) / "libfaulty.so"


def made_of() -> list[Path]:
    """All that the libraries are made of."""
    own = sorted(path for path in FIBRES.rglob("*") if path.is_file())
    return [*sources(), *sorted((ROOT / "plugins").rglob("*.h")), CAPI, *own, Path(__file__)]


def observers(builds: Builds) -> list[Path]:
    """The object files that run fibres and see what they read and write.

    In the order in which they are to be linked: the variables of fibres.cpp are initialized before the others ask.
    """

    def compile_them(folder: Path) -> None:
        for source in [*FIBRES.glob("*.cpp"), CAPI]:
            command = [*COMPILER, f"-I{ROOT}/plugins", "-O2", "-c", source]
            run([*command, "-o", folder / f"{source.stem}.o"])

    return sorted(builds.once("observers", made_of(), compile_them).glob("*.o"))


def compile_observed(source: Path, library: Path, others: list[Path], *options: str) -> None:
    """Compiles kernels for the fibres, with every access to memory observed (`fibres/races.cpp`)."""
    kernel = library.with_suffix(".o")
    given = [*COMPILER, *options, f"-I{ROOT}/plugins", "-Og", "-fno-exceptions"]
    run([*given, "-fsanitize=thread", "-x", "c++", "-c", source, "-o", kernel])
    run(["g++", "-shared", kernel, *others, "-o", library])


def run(command: Sequence[object]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
