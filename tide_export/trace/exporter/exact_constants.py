"""Lets the exporter's rewrite rules match constants without an absolute tolerance.

They take numbers up to 1e-8 for zero, so `x + 1e-8` would become `x`: a norm with that epsilon (Helium) would give NaN
for hidden states of zeros, such as the embedding of a padding token.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from onnxscript.rewriter._pattern_ir import Constant


class _NoTolerance:
    """Reads as 0 on every constant; what is written is kept for later."""

    def __get__(self, constant: Any, _owner: type) -> float:
        return 0.0

    def __set__(self, constant: Any, tolerance: float) -> None:
        constant.__dict__["_abs_tol"] = tolerance


def exact_constants() -> AbstractContextManager[Any]:
    """While open, small constants are no zeros for the rules."""
    return patch.object(Constant, "_abs_tol", _NoTolerance(), create=True)
