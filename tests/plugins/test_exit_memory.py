"""The shared memory that `plans.exit_memory` says the kernel needs is what the kernel asks for.

The kernel's own launch, as nvcc compiled it for the library, runs on a CUDA runtime that starts nothing
(described_gpu.cpp): it is told what GPU it is, refuses what that would refuse and keeps what is launched.
"""

import ctypes
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_runner import tk
from native_builds import cuda_headers, need

from tide_export.plans.exit_memory import LIMITS, ExitSizes, needed, shared_bytes

LARGE = ExitSizes(4096, 128, 4096, 64)  # of an 8B model with a long shortlist
INVALID = 1  # cudaErrorInvalidValue


class Launches:
    """The kernel's launches on a GPU that is described by the library's variables."""

    def __init__(self, library: Path) -> None:
        self.loaded = ctypes.CDLL(str(library))
        self.loaded.tide_exit_workspace.restype = ctypes.c_int64

    def gpu(self, version: int, cluster: int, processors: int, shared: int) -> None:
        for name, value in (("version", version), ("cluster", cluster), ("processors", processors)):
            ctypes.c_int.in_dll(self.loaded, f"gpu_{name}").value = value
        ctypes.c_longlong.in_dll(self.loaded, "gpu_shared").value = shared

    def launch(self, sizes: ExitSizes, kind: int = tk.FLOAT16, slots: int = 8, missing: int = 0) -> int:
        """CUDA's status; `missing`: bytes that the workspace lacks."""
        args = tk.ExitArgs(states_type=kind, slots=slots, tokens=1, exit_rows=2)
        args.hidden, args.bottleneck, args.shortlist = sizes.hidden, sizes.bottleneck, sizes.shortlist
        args.lens_rank = sizes.lens_rank
        args.norm = tk.NormArgs(tk.NORM_RMS, 1e-5, 256, 256)
        for name, kind in tk.ExitArgs._fields_:
            if kind is ctypes.c_void_p:
                setattr(args, name, 256)  # which nothing reads here
        size = self.workspace = self.loaded.tide_exit_workspace(ctypes.byref(args)) - missing
        return self.loaded.tide_exit(ctypes.byref(args), ctypes.c_void_p(256), ctypes.c_int64(size), None)

    @property
    def launched(self) -> tuple[int, int, int]:
        """Blocks, blocks to a cluster, and bytes of shared memory of the last launch."""
        counts = (ctypes.c_int.in_dll(self.loaded, f"launched_{name}").value for name in ("blocks", "cluster"))
        return (*counts, ctypes.c_longlong.in_dll(self.loaded, "launched_shared").value)


@pytest.fixture(scope="module")
def library(kernel_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel's object file from the archive of the plugins, linked with the CUDA runtime that starts nothing."""
    cuda = cuda_headers()
    need(cuda is not None, "there are no CUDA headers")
    target = tmp_path_factory.mktemp("launches") / "launches.so"
    objects = [
        Path(__file__).with_name("described_gpu.cpp"),
        "-u",
        "tide_exit",
        kernel_build / "libtide_plugins_static.a",
    ]
    subprocess.run(["g++", "-shared", "-fPIC", "-isystem", cuda, *objects, "-o", target], check=True)
    return target


@pytest.fixture
def launches(library: Path, tmp_path: Path) -> Launches:
    """Of a copy of the library, which remembers nothing of other GPUs."""
    return Launches(Path(shutil.copy(library, tmp_path / "launches.so")))


def shapes() -> Iterator[ExitSizes]:
    """Sizes of models, awkward ones, and many at random, of all that fit an H100."""
    yield from (LARGE, replace(LARGE, shortlist=256), replace(LARGE, hidden=8192, lens_rank=0), ExitSizes(1, 1, 0, 0))
    draw = random.Random(0)
    for _ in range(300):
        hidden, bottleneck = draw.randint(1, 16384), draw.randint(1, 512)
        yield ExitSizes(
            hidden, bottleneck, draw.choice((0, draw.randint(2, 8000))), draw.choice((0, draw.randint(1, 512)))
        )


@pytest.mark.parametrize(
    ("version", "cluster", "processors", "blocks"),
    [(90, 16, 132, 16), (90, 8, 132, 8), (120, 8, 170, 8), (75, 0, 40, 16), (86, 0, 10, 8), (75, 0, 7, 4)],
)
def test_a_block_asks_for_what_the_formula_says(
    launches: Launches, version: int, cluster: int, processors: int, blocks: int
) -> None:
    clusters = version >= 90
    launches.gpu(version, cluster, processors, 227 * 1024)
    for sizes in shapes():
        expected = shared_bytes(sizes, blocks, clusters)
        status = launches.launch(sizes)
        assert status == (0 if expected <= 227 * 1024 else INVALID), sizes
        if status == 0:
            teams = 2 if clusters else min(2, processors // blocks)
            assert launches.launched == (teams * blocks, blocks if clusters else 0, expected), sizes


@pytest.mark.parametrize("kind", [tk.FLOAT32, tk.FLOAT16, tk.BFLOAT16])
def test_all_types_ask_for_the_same(launches: Launches, kind: int) -> None:
    launches.gpu(90, 8, 132, 227 * 1024)
    assert launches.launch(LARGE, kind) == 0
    assert launches.launched[2] == shared_bytes(LARGE, 8, True) == 110_656


@pytest.mark.parametrize("capability", LIMITS)
def test_what_does_not_fit_is_what_cuda_refuses(launches: Launches, capability: tuple[int, int]) -> None:
    """At the limit of every compute capability, and one number above it."""
    limit, version = LIMITS[capability] * 1024, capability[0] * 10 + capability[1]
    launches.gpu(version, 8, 16, limit)
    field = "shortlist" if version >= 90 else "lens_rank"  # without clusters a shortlist takes no shared memory
    least = replace(LARGE, shortlist=2, lens_rank=1)
    fits = replace(least, **{field: getattr(least, field) + (limit - needed(least, capability)) // 16})
    above = replace(fits, **{field: getattr(fits, field) + 1})
    assert needed(fits, capability) <= limit < needed(above, capability)
    assert (launches.launch(fits), launches.launch(above)) == (0, INVALID)


def test_fewer_slots_need_no_larger_workspace(launches: Launches) -> None:
    """TensorRT is asked for that of the most sequences. A smaller one is refused."""
    needs = []
    for slots in range(1, 40):
        assert (launches.launch(LARGE, slots=slots), launches.launch(LARGE, slots=slots, missing=1)) == (0, INVALID)
        needs.append(launches.workspace)
    assert needs == sorted(needs)
