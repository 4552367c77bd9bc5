"""Writes the kernel that decides a step's depth as PTX into a header: cpp/src/segmented/step_kernel.ptx.h.

    python tools/step_kernel.py

Run it after a change of step_kernel.cu or step_decision.h, with nvcc of CUDA 13.0; a test compares.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "cpp" / "src"
SOURCE = SOURCES / "segmented" / "step_kernel.cu"
HEADER = SOURCE.with_suffix(".ptx.h")
OPTIONS = ("-std=c++17", "-O2", "--expt-relaxed-constexpr", "-arch=compute_75", "-ptx", f"-I{SOURCES}")
PTX_VERSION = "8.7"  # of CUDA 12.8, the first with switch nodes; what the kernel uses is older


def nvcc() -> str | None:
    """Returns the path of nvcc, where there is one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [str(Path(home) / "bin" / "nvcc") for home in homes if home and (Path(home) / "bin" / "nvcc").is_file()]
    return found[0] if found else shutil.which("nvcc")


def header(compiler: str) -> str:
    """Compiles the kernel; returns the header's text."""
    command = [compiler, *OPTIONS, str(SOURCE), "-o", "/dev/stdout"]
    ptx = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in ptx.splitlines() if line.strip() and not line.lstrip().startswith("//")]
    assert lines[0].startswith(".version ")
    lines[0] = f".version {PTX_VERSION}"
    return (
        "// step_kernel.cu for any GPU that TensorRT runs on, written by tools/step_kernel.py.\n"
        "#pragma once\n\nnamespace tide {\n\n"
        'constexpr char kStepKernel[] = R"(' + "\n".join(lines) + '\n)";\n\n}  // namespace tide\n'
    )


if __name__ == "__main__":
    found = nvcc()
    if found is None:
        sys.exit("there is no nvcc")
    HEADER.write_text(header(found))
