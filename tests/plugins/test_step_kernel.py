"""The kernel that decides a step's depth: the library's PTX is that of its source, every GPU's assembler takes it, and
what the library declares of the CUDA runtime is what CUDA's header says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_builds import ROOT, cuda_headers, need

sys.path.append(str(ROOT / "tools"))

import step_kernel

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120", "121")


@pytest.fixture(scope="module")
def nvcc() -> str:
    compiler = step_kernel.nvcc()
    need(compiler is not None, "there is no nvcc")
    assert compiler is not None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 13.0" not in version:
        pytest.skip("the PTX was compiled by nvcc 13.0")
    return compiler


def test_the_ptx_is_that_of_the_source(nvcc: str) -> None:
    assert step_kernel.HEADER.read_text() == step_kernel.header(nvcc), "run python tools/step_kernel.py"


def test_the_kernel_of_checkpoints_is_what_its_source_compiles_to(nvcc: str) -> None:
    """The same source as the plugin's, under the names that the launcher asks for."""
    assert step_kernel.EXIT_HEADER.read_text() == step_kernel.exit_header(nvcc), "run python tools/step_kernel.py"
    names = re.findall(r'"(tide_exit_\w+)"', (step_kernel.PLUGINS / "tide_exit" / "plan.h").read_text())
    assert re.findall(r"^\.visible \.entry (\w+)\(", step_kernel.ptx(nvcc, step_kernel.EXIT_SOURCE), re.M) == names
    assert len(names) == 3
    assert step_kernel.NOT_ON_CUDA in names


def test_every_gpu_takes_it(nvcc: str, tmp_path: Path) -> None:
    """Without a stack, and with few registers."""
    text = step_kernel.HEADER.read_text()
    ptx = tmp_path / "step_kernel.ptx"
    ptx.write_text(text[text.index('R"(') + 3 : text.index(')";')])
    ptxas = Path(nvcc).with_name("ptxas")
    for architecture in ARCHITECTURES:
        command = [str(ptxas), "-v", f"-arch=sm_{architecture}", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
        registers = int(done.stderr.split("Used ")[1].split()[0])
        assert registers <= 32, architecture


def test_the_declarations_are_those_of_cuda() -> None:
    headers, compiler = cuda_headers(), shutil.which("c++")
    need(headers is not None and compiler is not None, "there are no headers of CUDA, or no C++ compiler")
    source = Path(__file__).with_name("cudart_header.cpp")
    command = ["c++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "-isystem", str(headers), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
