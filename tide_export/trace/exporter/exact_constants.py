"""Lets the exporter's rewrite rules match constants without an absolute tolerance.

They take numbers up to 1e-8 for zero, so `x + 1e-8` would become `x`: a norm with that epsilon (Helium) would give NaN
for states of zeros, such as the embedding of a padding token.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from onnxscript.rewriter._pattern_ir import Constant


@contextmanager
def exact_constants() -> Iterator[None]:
    """While open, small constants are no zeros for the rules."""
    keep = lambda constant, tolerance: constant.__dict__.update(_abs_tol=tolerance)  # noqa: E731
    setattr(Constant, "_abs_tol", property(lambda _: 0.0, keep))  # noqa: B010
    try:
        yield
    finally:
        delattr(Constant, "_abs_tol")
