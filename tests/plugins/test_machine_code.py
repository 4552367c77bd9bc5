"""What nvcc makes of the kernel as it is shipped: registers and nothing on the stack, for every architecture, as
plugins/README.md lists them.

    PYTHONPATH=.:tests python tests/plugins/test_machine_code.py      writes that table anew
"""

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import kernel_barriers
import pytest
import tiers
from native_builds import QUICK_ARCHITECTURES, ROOT, Builds, need

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120, 121)
MAX_REGISTERS = 128  # of each of the 512 threads of a block: 65,536 registers a multiprocessor
PAGE = ROOT / "plugins" / "README.md"
TYPES = ("bfloat16", "float16", "float32")
REPORT = re.compile(
    r"Compiling entry function 'tide_exit_(?P<type>\w+)' for 'sm_(?P<architecture>\d+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True, order=True)
class Kernel:
    """One instantiation: bytes of stack, of spill stores and loads, and of shared memory that is declared in it."""

    architecture: int
    type: str
    registers: int
    stack: int
    stores: int
    loads: int
    shared: int


def nvcc_version() -> str:
    shown = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V([\d.]+)", shown)[1]


def compile_for(architectures: tuple[int, ...], folder: Path) -> None:
    """Compiles the kernel for these GPUs as `cmake --preset plugins` does, and writes what ptxas says to ptxas.txt."""
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in architectures]
    options = ["-std=c++17", "-O3", "-Xptxas", "-v", "--threads", "2"]
    command = ["nvcc", *targets, *options, "-fatbin", "-o", str(folder / "kernel.fatbin"), "-I", "plugins"]
    command.append("plugins/tide_exit/kernel.cu")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (folder / "ptxas.txt").write_text(done.stderr)


def kernels_in(said: Path) -> list[Kernel]:
    """What ptxas said last of each kernel for each GPU."""
    found = [kernel(one) for one in REPORT.finditer(said.read_text(errors="replace"))]
    return sorted({(one.architecture, one.type): one for one in found}.values())


def kernel(found: re.Match) -> Kernel:
    numbers = [int(found[name]) for name in ("registers", "stack", "stores", "loads")]
    shared = re.search(r"(\d+) bytes smem", found["rest"])
    return Kernel(int(found["architecture"]), found["type"], *numbers, int(shared[1]) if shared else 0)


def resources_row(architecture: int, kernels: list[Kernel]) -> tuple[object, ...]:
    """Registers by type of states."""
    registers = {one.type: one.registers for one in kernels if one.architecture == architecture}
    return (f"sm_{architecture}", *(registers[kind] for kind in TYPES))


def resources_table(version: str, kernels: list[Kernel]) -> str:
    """Returns the page's table: registers by GPU and type of states."""
    rows = [resources_row(sm, kernels) for sm in ARCHITECTURES]
    return f"nvcc {version}:\n\n" + table(("GPU", *TYPES), rows)


def table(heads: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(map(table_line, lines))


def table_line(cells: tuple[object, ...]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


@pytest.fixture(scope="module")
def quick(builds: Builds, kernel_build: Path) -> list[Kernel]:
    """Of the library that all tests of the plugins use."""
    return kernels_in(builds.folder / "plugins.log")


@pytest.fixture(scope="module")
def others(builds: Builds) -> list[Kernel]:
    """For all other GPUs."""
    need(shutil.which("nvcc") is not None, "there is no nvcc")
    left = tuple(one for one in ARCHITECTURES if one not in QUICK_ARCHITECTURES)
    depends = [nvcc_version(), Path(__file__), *kernel_barriers.sources(), *sorted((ROOT / "plugins").rglob("*.h"))]
    return kernels_in(builds.once("machine-code", depends, lambda folder: compile_for(left, folder)) / "ptxas.txt")


@pytest.mark.parametrize("architecture", tiers.exhaustive_but(QUICK_ARCHITECTURES, ARCHITECTURES))
def test_no_kernel_spills_and_the_page_lists_its_registers(architecture: int, request: pytest.FixtureRequest) -> None:
    kernels = request.getfixturevalue("quick" if architecture in QUICK_ARCHITECTURES else "others")
    of_it = [one for one in kernels if one.architecture == architecture]
    assert sorted(one.type for one in of_it) == list(TYPES)
    for one in of_it:
        assert (one.stack, one.stores, one.loads) == (0, 0, 0), one
        assert one.registers <= MAX_REGISTERS, one
        assert one.shared == 0, one  # a launch asks for it
    page, version = PAGE.read_text(), nvcc_version()
    if f"nvcc {version}:" not in page:
        pytest.skip(f"the page is of another nvcc than {version}")
    listed = re.findall(r"^\| sm_\d+ .*$", page, re.MULTILINE)
    assert [line.split()[1] for line in listed] == [f"sm_{one}" for one in ARCHITECTURES]
    row = table_line(resources_row(architecture, kernels))
    assert listed[ARCHITECTURES.index(architecture)] == row, "write it anew: see the top of this file"


def test_a_kernel_with_a_stack_and_shared_memory_is_read() -> None:
    """As ptxas of nvcc 13.0 writes it."""
    said = """ptxas info    : Compiling entry function 'tide_exit_float32' for 'sm_120'
ptxas info    : Function properties for tide_exit_float32
    520 bytes stack frame, 580 bytes spill stores, 900 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 520 bytes cumulative stack size, 1024 bytes smem
"""
    assert [kernel(found) for found in REPORT.finditer(said)] == [Kernel(120, "float32", 128, 520, 580, 900, 1024)]


def write_page() -> None:
    """Puts the table into the page."""
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        compile_for(ARCHITECTURES, Path(folder))
        made = resources_table(nvcc_version(), kernels_in(Path(folder) / "ptxas.txt"))
    rows = r"(?:\|.*\n)*\|[^\n]*"
    PAGE.write_text(re.sub(r"nvcc [\d.]+:\n\n" + rows, lambda _: made, text, count=1))


if __name__ == "__main__":
    write_page()
