"""nvcc compiles the kernel; which architectures are chosen when."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_runner import tk
from native_builds import ROOT, need


def test_the_kernel_compiles(kernel_build: Path):
    kernels = tk.Kernels(kernel_build / "libtide_kernels.so")  # the library opens without a driver
    with pytest.raises(tk.KernelError):
        kernels.emulate()
    assert kernels.exit_workspace(tk.ExitArgs(slots=1, tokens=1, hidden=8, exit_rows=1, bottleneck=4)) == 512 * 4


@pytest.mark.parametrize(
    ("given", "gpus", "expected"),
    [
        ("", None, "75-real;80-real;86-real;89-real;90;100-real;120 (no GPU here: all)"),
        ("", "9.0", "90 (the GPU in this machine)"),
        ("", "8.6\n12.0\n8.6", "86;120 (the GPU in this machine)"),
        ("", "No devices were found", "75-real;80-real;86-real;89-real;90;100-real;120 (no GPU here: all)"),
        ("80,90", "8.6", "80;90 (CUDA_ARCHITECTURES)"),
    ],
)
def test_architectures_chosen(tmp_path: Path, given, gpus, expected):
    need(shutil.which("cmake") is not None, "there is no cmake")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + ("exit 9\n" if gpus is None else f"cat <<END\n{gpus}\nEND\n"))
    smi.chmod(0o755)
    script = tmp_path / "choose.cmake"
    script.write_text(
        f"set(CUDA_ARCHITECTURES {given})\ninclude({ROOT}/cmake/CudaArchitectures.cmake)\n"
        'tide_choose_cuda_architectures()\nmessage(STATUS "set to ${CMAKE_CUDA_ARCHITECTURES}")\n'
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["cmake", "-P", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"kernels for {expected}" in done.stdout
    assert f"set to {expected.split()[0]}" in done.stdout


def test_a_tensorrt_root_without_headers_is_an_error(tmp_path: Path):
    need(shutil.which("cmake") is not None, "there is no cmake")
    command = ["cmake", "--preset", "plugins", "-B", str(tmp_path / "build"), f"-DTENSORRT_ROOT={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "there is no include/NvInfer.h in it" in " ".join(done.stderr.split())
