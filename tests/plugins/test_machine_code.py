"""What nvcc makes of the kernel as it is shipped: registers and nothing on the stack, for every architecture; and no
load before the kernel that gives its inputs has ended."""

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


BEFORE_WAIT = {"ld.param", "prefetch.global.L2"}  # parameters, and weights, which no kernel writes
ACCESS = re.compile(r"^\s+(?:@!?%p\d+ )?((?:ld|st|atom|red|prefetch|cp)\.[\w.:]+)", re.M)
WAIT = "griddepcontrol.wait;"


def violations(ptx: str) -> list[str]:
    """What may read or write memory of another kernel before it has ended, of a PTX program's kernels."""
    found = []
    for kernel in re.split(r"^\.entry ", ptx, flags=re.M)[1:]:
        if WAIT not in kernel:
            found.append("a kernel that does not wait")
            continue
        before, after = kernel.split(WAIT, 1)
        kinds = (access for access in ACCESS.findall(before))
        found += [access for access in kinds if not any(access.startswith(kind) for kind in BEFORE_WAIT)]
        found += [
            f"a jump to {label}" for label in re.findall(r"bra(?:\.uni)?\s*(\$\w+);", before) if f"{label}:" in after
        ]
    return found


def test_nothing_is_read_before_the_kernel_before_has_ended(tmp_path: Path) -> None:
    """With programmatic dependent launch (from compute capability 9.0) a kernel starts while the one before runs."""
    need(shutil.which("nvcc") is not None, "there is no nvcc")
    options = ["-std=c++17", "-O3", "-arch=compute_90", "-ptx", "-o", str(tmp_path / "kernel.ptx"), "-I", "plugins"]
    subprocess.run(["nvcc", *options, "plugins/tide_exit/kernel.cu"], cwd=ROOT, check=True)
    ptx = (tmp_path / "kernel.ptx").read_text()
    assert ptx.count(WAIT) == 3
    assert violations(ptx) == []
    # It would see a wait that is missing, late, or jumped over.
    assert violations(ptx.replace(WAIT, "", 1)) == ["a kernel that does not wait"]
    first_load = ptx.index("ld.global", ptx.index(WAIT))
    end = ptx.index("\n", first_load) + 1
    late = ptx[:end].replace(WAIT, "", 1) + f"\t{WAIT}\n" + ptx[end:]
    assert any(access.startswith("ld.global") for access in violations(late))
    assert violations(ptx.replace(WAIT, f"\tbra.uni \t$L_over;\n{WAIT}\n$L_over:", 1)) != []
