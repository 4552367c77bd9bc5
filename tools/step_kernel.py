"""Writes the library's kernels into headers: step_kernel.ptx.h and exit_kernel.ptx.h, below cpp/src.

    python tools/step_kernel.py

Run it after a change of what they are made of, with nvcc of CUDA 13.0; a test compares. The kernel that decides a
step's depth is text, for CUDA 12.8 and newer; that of a checkpoint, which is large, is compressed as nvcc does it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SOURCES, PLUGINS = ROOT / "cpp" / "src", ROOT / "plugins"
SOURCE = SOURCES / "segmented" / "step_kernel.cu"
HEADER = SOURCE.with_suffix(".ptx.h")
EXIT_SOURCE = PLUGINS / "tide_exit" / "kernel.cu"
EXIT_HEADER = SOURCES / "onnxruntime" / "exit_kernel.ptx.h"
NOT_ON_CUDA = "tide_exit_float32"  # networks for provider cuda are in half precision
OPTIONS = ("-std=c++17", "-O2", "--expt-relaxed-constexpr", f"-I{SOURCES}", f"-I{PLUGINS}")
PTX_VERSION = "8.7"  # of CUDA 12.8, the first with switch nodes; what the kernel uses is older
COMPRESSED = ("-gencode=arch=compute_75,code=compute_75", "-compress-mode=size", "-fatbin")
WORDS = 6  # in a line


def nvcc() -> str | None:
    """Returns the path of nvcc, where there is one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [str(Path(home) / "bin" / "nvcc") for home in homes if home and (Path(home) / "bin" / "nvcc").is_file()]
    return found[0] if found else shutil.which("nvcc")


def ptx(compiler: str, source: Path) -> str:
    """Compiles a source to PTX for any GPU since compute capability 7.5."""
    command = [compiler, *OPTIONS, "-arch=compute_75", "-ptx", str(source), "-o", "/dev/stdout"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def header(compiler: str) -> str:
    """Compiles the kernel of steps; returns the header's text."""
    lines = [line for line in ptx(compiler, SOURCE).splitlines() if line.strip() and not line.lstrip().startswith("//")]
    assert lines[0].startswith(".version ")
    lines[0] = f".version {PTX_VERSION}"
    return (
        "// step_kernel.cu for any GPU that TensorRT runs on, written by tools/step_kernel.py.\n"
        "#pragma once\n\nnamespace tide {\n\n"
        'constexpr char kStepKernel[] = R"(' + "\n".join(lines) + '\n)";\n\n}  // namespace tide\n'
    )


def exit_header(compiler: str) -> str:
    """Compiles the kernels of checkpoints; returns the header's text."""
    text = ptx(compiler, EXIT_SOURCE)
    start = text.index(f".visible .entry {NOT_ON_CUDA}(")
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text[:start] + text[text.index("\n}\n", start) + 3 :])
        command = [compiler, *COMPRESSED, str(source), "-o", "/dev/stdout"]
        data = subprocess.run(command, capture_output=True, check=True).stdout
    words = [f"0x{int.from_bytes(data[at : at + 8], 'little'):x}" for at in range(0, len(data), 8)]
    lines = [", ".join(words[at : at + WORDS]) for at in range(0, len(words), WORDS)]
    return (
        "// plugins/tide_exit/kernel.cu in half precision as compressed PTX for any GPU, by tools/step_kernel.py.\n"
        "#pragma once\n\n#include <cstdint>\n\nnamespace tide {\n\n"
        "alignas(64) constexpr std::uint64_t kExitKernel[] = {\n" + ",\n".join(lines) + "};\n\n}  // namespace tide\n"
    )


if __name__ == "__main__":
    found = nvcc()
    if found is None:
        sys.exit("there is no nvcc")
    HEADER.write_text(header(found))
    EXIT_HEADER.write_text(exit_header(found))
