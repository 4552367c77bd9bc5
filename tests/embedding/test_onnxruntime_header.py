"""What cpp/ declares of ONNX Runtime's C interface equals its header, where there is one."""

import os
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(os.environ.get("ONNXRUNTIME_INCLUDE", "/usr/include/onnxruntime"))


@pytest.mark.skipif(not (INCLUDE / "onnxruntime_c_api.h").is_file(), reason="there are no headers of ONNX Runtime")
def test_the_declarations_are_those_of_the_header() -> None:
    source = Path(__file__).with_name("onnxruntime_header.cpp")
    command = ["c++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "-isystem", str(INCLUDE), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
