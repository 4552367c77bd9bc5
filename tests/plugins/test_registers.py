"""What ptxas makes of the kernel as it is shipped, for every architecture: registers, and nothing on the stack."""

import re
import shutil
import subprocess
from pathlib import Path

from native_builds import ROOT, need

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120, 121)
MAX_REGISTERS = 128  # of each of the 512 threads of a block: 65,536 registers a multiprocessor
REPORT = re.compile(r"for '(sm_\d+)'|(\d+) bytes stack frame, (\d+) bytes spill|Used (\d+) registers")


def compiled(folder: Path) -> dict[int, list[tuple[int, int, int]]]:
    """By architecture, each kernel's registers, bytes of stack and of spill stores."""
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in ARCHITECTURES]
    options = ["-std=c++17", "-O3", "-Xptxas", "-v", "--threads", "2", "-c", "-o", str(folder / "kernel.o")]
    command = ["nvcc", *targets, *options, "-I", "plugins", "plugins/tide_exit/kernel.cu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[int, list[tuple[int, int, int]]] = {}
    for architecture, stack, spilled, registers in REPORT.findall(done.stderr):
        if architecture:
            kernels = found.setdefault(int(architecture.removeprefix("sm_")), [])
        elif stack:
            memory = int(stack), int(spilled)
        else:
            kernels.append((int(registers), *memory))
    return found


def test_no_kernel_spills_on_any_architecture(tmp_path: Path) -> None:
    need(shutil.which("nvcc") is not None, "there is no nvcc")
    found = compiled(tmp_path)
    assert sorted(found) == sorted(ARCHITECTURES)
    assert {len(kernels) for kernels in found.values()} == {3}, "one for each type of states"
    for architecture, kernels in found.items():
        for registers, stack, spilled in kernels:
            assert (stack, spilled) == (0, 0), f"sm_{architecture}"
            assert registers <= MAX_REGISTERS, f"sm_{architecture}"
