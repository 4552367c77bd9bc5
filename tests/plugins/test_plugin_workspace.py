"""The plugin tells the kernel the size of the workspace it asked TensorRT for, so that the kernel's check holds.

It gives it counters of its own: 0 at first, for each context others, freed at last.
"""

import shutil
import subprocess
from pathlib import Path

from native_builds import ROOT, cuda_headers, need, tensorrt_root

SOURCES = ("plugins/tide_exit/plugin.cpp", "plugins/common/plugin.cpp", "tests/plugins/workspace_user.cpp")


def test_the_kernel_is_told_the_size_of_the_workspace(tmp_path: Path) -> None:
    compiler, cuda = shutil.which("c++") or shutil.which("g++"), cuda_headers()
    need(compiler is not None, "there is no C++ compiler")
    need(cuda is not None, "there are no CUDA headers")
    include = ["-I", "plugins", "-isystem", f"{tensorrt_root()}/include", "-isystem", str(cuda)]
    program = tmp_path / "workspace_user"
    subprocess.run([str(compiler), "-std=c++17", *include, *SOURCES, "-o", str(program)], cwd=ROOT, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
