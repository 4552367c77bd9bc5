"""CUDA's libraries are found where pip put them, and two builds of ONNX Runtime are refused."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from tide_export.errors import ProviderError
from tide_export.runtime import cuda_libraries

ROOT = Path(__file__).parents[2]
USER = """
import ctypes, sys
from tide_export.runtime.cuda_libraries import preload_cuda
try:
    ctypes.CDLL("libcublas.so.13")
    sys.exit("it was found without")
except OSError:
    preload_cuda()
print(ctypes.CDLL("libcublas.so.13").cublas_answer())
"""


def library(path: Path, source: str, *links: str) -> None:
    from tide_build import installed_compiler

    command = installed_compiler()
    if command is None:
        pytest.skip("there is no C++ compiler")
    path.parent.mkdir(parents=True)
    options = ["-shared", "-fPIC", "-x", "c++", "-", f"-Wl,-soname,{path.name}", "-o", str(path), *links]
    subprocess.run([*command, *options], input=source.encode(), check=True)


def test_libraries_of_packages_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS needs cuBLASLt, which the system would not find either."""
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    packages = tmp_path / "nvidia" / "cu13" / "lib", tmp_path / "nvidia" / "other" / "lib"
    first, second = packages[0] / "libcublasLt.so.13", packages[1] / "libcublas.so.13"
    library(first, 'extern "C" int lt_answer() { return 42; }')
    needs = ("-Wl,--no-as-needed", f"-L{first.parent}", "-l:libcublasLt.so.13")
    library(second, 'extern "C" int lt_answer(); extern "C" int cublas_answer() { return lt_answer(); }', *needs)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", USER], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "42\n", done.stderr


def test_without_packages_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(cuda_libraries, "_opened", [])
    monkeypatch.setattr(cuda_libraries, "find_spec", lambda name: None)
    monkeypatch.setattr(ctypes, "CDLL", opened.append)
    cuda_libraries.preload_cuda()
    assert opened == []


def test_two_builds_of_onnxruntime_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_libraries.check_packages()  # here is one
    monkeypatch.setattr(cuda_libraries, "version", lambda name: "1.31.0")
    with pytest.raises(ProviderError, match="are both installed and overwrite each other's files: pip uninstall"):
        cuda_libraries.check_packages()
