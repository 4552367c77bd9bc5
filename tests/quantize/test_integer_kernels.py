"""The kernels for integers of 4 and 8 bits, which give the same bits, and the instructions that a process may use."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from families import build
from tiny_configs import CHECKPOINTS
from tiny_engines import engine_of, pieces_of

from tide_export.bundle.manifest import Quantization
from tide_export.quantize.flow import quantize_model
from tide_export.routers.random_routers import random_routers

FORMATS = {"int4": 4, "int8": 8, "mxfp4": 4}  # bits
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SIZES = [(1, 16, 16), (38, 704, 16), (64, 576, 32), (41, 1024, 32), (9, 128, 64), (39, 384, 128), (37, 768, 256)]


def product(
    library: Path, instruction_set: str, kind: str, x: np.ndarray, integers: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    """By the kernel of that instruction set; skips the test where this CPU has none."""
    rows, blocks, block_bytes = integers.shape
    y = np.full((len(x), rows), np.nan, np.float32)
    arrays = (ctypes.c_void_p(array.ctypes.data) for array in (x, integers, scales))
    sizes = (ctypes.c_int64(size) for size in (len(x), rows, x.shape[1], block_bytes * 8 // FORMATS[kind]))
    assert x.shape[1] == blocks * block_bytes * 8 // FORMATS[kind]
    kernel = ctypes.CDLL(str(library)).integer_matmul
    if kernel(instruction_set.encode(), list(FORMATS).index(kind), *arrays, *sizes, ctypes.c_void_p(y.ctypes.data)):
        pytest.skip(f"this CPU has no {instruction_set}")
    return y


def stored(kind: str, rows: int, columns: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Random integers, the extreme ones among them, and scales."""
    rng = np.random.default_rng(columns)
    blocks = columns // block_size
    integers = rng.integers(0, 256, (rows, blocks, block_size * FORMATS[kind] // 8), dtype=np.uint8)
    integers[0] = 255
    integers[-1] = 0
    if kind == "mxfp4":
        return integers, rng.integers(120, 130, (rows, blocks), dtype=np.uint8)
    scales = rng.standard_normal((rows, blocks), dtype=np.float32)
    return integers, scales.astype(np.float16).astype(np.float32) if columns % 3 == 0 else scales


def values(kind: str, integers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weights, float64 [rows, blocks, block_size]."""
    if kind == "int8":
        return (integers.astype(np.float64) - 128) * scales[..., np.newaxis]
    codes = np.stack([integers & 15, integers >> 4], axis=-1).reshape(*integers.shape[:2], -1)
    if kind == "int4":
        return (codes.astype(np.float64) - 8) * scales[..., np.newaxis]
    return E2M1[codes].astype(np.float64) * np.exp2(scales.astype(np.float64) - 127)[..., np.newaxis]


def rounded(x: np.ndarray, block_size: int) -> np.ndarray:
    """The inputs as they are multiplied, float64 [m, blocks, block_size]: 8 bits a block."""
    blocks = x.reshape(len(x), -1, block_size)
    most = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    return np.rint(blocks * inverse).astype(np.float64) * (most / np.float32(127)).astype(np.float64)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("instruction_set", ["vnni", "avx2"])
@pytest.mark.parametrize(("rows", "columns", "block_size"), SIZES)
def test_a_kernel(kernels: Path, instruction_set: str, rows: int, columns: int, block_size: int, kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((19, columns), dtype=np.float32)
    x[1] = 3  # all at the largest integer, with the largest weights
    x[2] = -3
    x[3] = 0
    integers, scales = stored(kind, rows, columns, block_size)
    weights = values(kind, integers, scales)
    exact = np.einsum("mbk,nbk->mn", rounded(x, block_size), weights)
    size = np.einsum("mbk,nbk->mn", np.abs(rounded(x, block_size)), np.abs(weights))  # of what is added up
    whole = product(kernels, instruction_set, kind, x, integers, scales)
    assert (np.abs(whole - exact) <= 2e-6 * size).all()
    for count in (*range(1, 14), 18):  # not even rounding depends on how many rows there are
        some = product(kernels, instruction_set, kind, x[:count], integers, scales)
        np.testing.assert_array_equal(some, whole[:count])


@pytest.mark.parametrize("kind", FORMATS)
def test_both_give_the_same_bits(kernels: Path, kind: str) -> None:
    x = np.random.default_rng(2).standard_normal((7, 960), dtype=np.float32)
    x[0] *= np.exp2(np.arange(960, dtype=np.float32) % 40 - 20)
    integers, scales = stored(kind, 70, 960, 32)
    results = [product(kernels, name, kind, x, integers, scales) for name in ("vnni", "avx2")]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("instruction_set", ["vnni", "avx2"])
def test_numbers_that_are_not_finite_make_nan(kernels: Path, instruction_set: str) -> None:
    integers, scales = stored("int4", 33, 64, 32)
    for place in range(0, 64, 7):  # wherever in a vector
        for number in (np.nan, np.inf, -np.inf):
            x = np.ones((2, 64), np.float32)
            x[1, place] = number
            y = product(kernels, instruction_set, "int4", x, integers, scales)
            assert np.isfinite(y[0]).all()
            assert np.isnan(y[1]).all()


SCRIPT = """
import sys
from tide_export.runtime.engine import load
engine = load(sys.argv[1], provider="cpu")
for options in {"mode": "full"}, {"mode": "exit", "threshold": 0.6}:
    print(engine.generate([5, 6, 7, 8], max_new_tokens=12, stop_token_ids=[], **options).tokens)
"""


def generated(bundle: Path, instructions: str | None) -> subprocess.CompletedProcess[str]:
    """Two generations by a process that may use these instructions at most."""
    environment = {name: value for name, value in os.environ.items() if name != "TIDE_INSTRUCTIONS"}
    environment |= {} if instructions is None else {"TIDE_INSTRUCTIONS": instructions}
    command = [sys.executable, "-c", SCRIPT, str(bundle)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_process_keeps_to_the_instructions_it_is_allowed(tmp_path: Path) -> None:
    source = build("llama")
    quantize_model(source, Quantization("rtn", 4, 32, True, 4))
    routers = random_routers(source, CHECKPOINTS, list(range(3, 40)), bottleneck=16, lens_rank=8)
    bundle = tmp_path / "bundle"
    engine_of(source, routers, bundle, pieces_of(source, CHECKPOINTS))
    made = [generated(bundle, name) for name in (None, "avx2", "baseline")]
    assert made[0].stdout.startswith("["), made[0].stderr
    assert len({one.stdout for one in made}) == 1, [one.stdout + one.stderr for one in made]
    unknown = generated(bundle, "avx")
    assert unknown.returncode != 0
    assert "TIDE_INSTRUCTIONS must be avx2 or baseline" in unknown.stderr
