"""Functions of each number, by every instruction set, against NumPy in float64."""

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

FUNCTIONS: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "sigmoid": (1, lambda x: 1 / (1 + np.exp(-x))),
    "exponential": (2, np.exp),
    "gelu": (3, lambda x: np.array([each * (1 + math.erf(each / math.sqrt(2))) / 2 for each in x])),
    "tanh_gelu": (4, lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
}


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize(("number", "exact"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function(instruction_set: str, number: int, exact: Callable, kernels: Path) -> None:
    rng = np.random.default_rng(number)
    x = np.concatenate([rng.standard_normal(500) * 3, np.linspace(-80, 80, 201), [0, -0.0, 1e-7, -1e-7]])
    x = x.astype(np.float32)
    whole = _computed(kernels, instruction_set, number, x)
    with np.errstate(over="ignore"):
        wanted = exact(x.astype(np.float64))
    np.testing.assert_allclose(whole, wanted, rtol=3e-6, atol=3e-7)
    assert np.abs(wanted[:500]).max() > 0.9
    apart = [_computed(kernels, instruction_set, number, x[i : i + 7]) for i in range(0, len(x), 7)]
    np.testing.assert_array_equal(np.concatenate(apart), whole)  # whatever its place in a vector


def _computed(library: Path, instruction_set: str, number: int, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, y))
    function = ctypes.CDLL(str(library)).elementwise
    if function(instruction_set.encode(), number, next(pointers), ctypes.c_int64(len(x)), next(pointers)):
        pytest.skip(f"this CPU has no {instruction_set}")
    return y
