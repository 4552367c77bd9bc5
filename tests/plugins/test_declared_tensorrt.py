"""declared/include/NvInfer.h, with which the tests compile the plugins where there are no headers of TensorRT, is
NVIDIA's as far as the plugins can tell. Needs those headers (TENSORRT_ROOT)."""

import shutil
import subprocess
from pathlib import Path

import pytest
from native_builds import DECLARED, ROOT, cuda_headers, need, tensorrt_root


@pytest.mark.parametrize(
    "source",
    [
        "plugins/common/plugin.cpp",
        "plugins/common/registry.cpp",
        "plugins/tide_exit/plugin.cpp",
        "tests/plugins/registry_user.cpp",
    ],
)
def test_the_plugins_are_the_same_machine_code_with_nvidia_s_headers(source: str, tmp_path: Path):
    if tensorrt_root() == str(DECLARED):
        pytest.skip("TENSORRT_ROOT has no TensorRT headers")
    compiler, cuda = shutil.which("c++") or shutil.which("g++"), cuda_headers()
    need(compiler is not None, "there is no C++ compiler")
    need(cuda is not None, "there are no CUDA headers")
    compiled = []
    for name, root in (("nvidia", tensorrt_root()), ("declared", DECLARED)):
        target = tmp_path / f"{name}.o"
        include = ["-I", "plugins", "-isystem", f"{root}/include", "-isystem", str(cuda)]
        defined = '-DTIDE_EXPORT_VERSION="1.0"'
        command = [str(compiler), "-std=c++17", "-O2", "-fPIC", defined, *include, "-c", source, "-o", str(target)]
        subprocess.run(command, cwd=ROOT, check=True)
        compiled.append(target.read_bytes())
    assert compiled[0] == compiled[1]
