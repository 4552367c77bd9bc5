"""Builds the library with the headers of TensorRT, or of TensorRT for RTX, and stand-ins for them and for CUDA: where
TENSORRT_ROOT or TENSORRT_RTX_ROOT names a folder with their include/; elsewhere the tests are skipped."""

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tide_build
from c_interface import CEngine, Refused, open_library
from caller_networks import CallersNetworks
from fake_cudart import compiled
from tensorrt_stubs import stubs

from tide_export.bundle.network_spec import RunSize
from tide_export.common.version import __version__

# By flavour: the variable, how the version is defined in its headers, and the name of its library.
HEADERS = {
    "tensorrt": ("TENSORRT_ROOT", "ENTERPRISE", "libnvinfer"),
    "tensorrt-rtx": ("TENSORRT_RTX_ROOT", "RTX", "libtensorrt_rtx"),
}
Log = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
Run = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_void_p)),
    *(ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
)


def headers_of(flavour: str) -> tuple[Path, str]:
    """The folder with a flavour's include/, and its version; skips where there is none."""
    variable, suffix, _ = HEADERS[flavour]
    root = Path(os.environ.get(variable) or "missing")
    defines = root / "include" / "NvInferVersion.h"
    numbers = re.findall(rf"#define TRT_[A-Z]+_{suffix} (\d+)", defines.read_text() if defines.is_file() else "")
    if len(numbers) != 4:
        pytest.skip(f"{variable} names no headers of {flavour}")
    return root, ".".join(numbers)


class Build:
    """The library with a flavour's headers, and the stand-in for the flavour's, which runs a bundle's networks.

    Attributes:
        log: sentences that the library logged.
    """

    def __init__(self, flavour: str, folder: Path, cudart: Path) -> None:
        root, self.version = headers_of(flavour)
        self.binary, folder = folder / flavour / "libtide.so", folder / flavour
        folder.mkdir(parents=True, exist_ok=True)
        newest = max(path.stat().st_mtime for path in tide_build.depends())
        if not self.binary.is_file() or self.binary.stat().st_mtime < newest:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TENSORRT_ROOT", str(root))
                tide_build.build(self.binary, folder / "build", __version__)
        (folder / "tensorrt_stubs.h").write_text(stubs(root / "include"))
        named = f"{HEADERS[flavour][2]}.so.{self.version.partition('.')[0]}"
        includes = (f"-I{folder}", f"-I{root / 'include'}", f"-I{tide_build.cuda_home()}/include")
        options = (*includes, f"-Wl,-soname,{named}", str(cudart))
        self._stand_in = ctypes.CDLL(
            str(compiled(Path(__file__).with_name("fake_nvinfer.cpp"), folder / named, *options))
        )
        self.functions, self.log = open_library(self.binary), list[str]()
        self._logging = Log(lambda sentence: self.log.append(sentence.decode()))
        self.functions.tide_set_log(self._logging)

    def run_networks(self, networks: CallersNetworks) -> None:
        """Lets the engines compute what these networks do."""

        def run(name: bytes, tensors: Any, addresses: Any, count: int, *size: int) -> int:
            found = {tensors[i].decode(): addresses[i] for i in range(count)}
            networks.run(name.decode(), found, RunSize(*size), 0, False)
            return 0

        self._running = Run(run)
        pointer = ctypes.c_void_p.in_dll(self._stand_in, "fake_trt_run")
        pointer.value = ctypes.cast(self._running, ctypes.c_void_p).value


Opens = Callable[..., CEngine]
BUNDLE_ERROR, GENERATION_ERROR, PROVIDER_ERROR = 3, 4, 6


@contextmanager
def refused(status: int, sentence: str) -> Iterator[None]:
    """Requires that a call fails with a status and a sentence."""
    with pytest.raises(Refused, match=sentence) as caught:
        yield
    assert caught.value.status == status
