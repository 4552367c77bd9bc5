"""Registers the operators of `cpp/ops` in ONNX Runtime: matmuls by weights in bfloat16, float16 and integers,
checkpoints, and attention to K/V in float32 and int8.

Installing the package compiles them where there is a C++ compiler (`setup.py`). Without them a bundle runs too, unless
its K/V are int8: the other operators are also functions in the graph. Weights in 16 bits are then widened to float32 as
ONNX Runtime loads them, integers are multiplied by MatMulNBits, checkpoints compute scores that no threshold
needs, and attention is GroupQueryAttention.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

from tide_export.errors import ProviderError
from tide_export.names import OPERATORS
from tide_export.version import __version__

logger = logging.getLogger("tide_export")

LIBRARY = Path(__file__).with_name("libtide_ops.so")


WIDENED = "the weights are widened to float32 at loading, which takes three times the memory and twice the time a token"
OTHERS = "ONNX Runtime's own matmuls take more time"
SLOWER = {  # by the weights of a bundle: what they are called, and what happens without their operators
    "bf16": ("bfloat16", WIDENED),
    "fp16": ("float16", WIDENED),
    "int8": ("8 bits", OTHERS),
    "int4": ("4 bits", OTHERS),
}


def register_operators(options: Any, weights: str = "fp32") -> None:
    """Adds the operators to the options of a session, if they are installed.

    Args:
        weights: of the bundle: where they have operators, a missing library is worth a warning, once.

    Raises:
        ProviderError: the library is of another version or for another kind of machine.
    """
    if LIBRARY.is_file():
        load_operators(LIBRARY)
        options.register_custom_ops_library(str(LIBRARY))
    elif weights in SLOWER:
        _warn_missing(*SLOWER[weights])


def require_operators() -> None:
    """Raises ProviderError if the operators are not installed."""
    if not LIBRARY.is_file():
        raise ProviderError(
            "the operators for K/V in int8 are not installed (there was no C++ compiler): install g++, then "
            "tide_export again; or export with --kv-cache float32"
        )


@cache
def load_operators(library: Path) -> ctypes.CDLL:
    """Opens the library and checks its version; warns if it was compiled before an operator was added.

    Raises:
        ProviderError: it does not open here, or is of another version.
    """
    advice = "install tide_export again on this machine"
    try:
        opened = ctypes.CDLL(str(library))
        version = opened.tide_ops_version
    except (OSError, AttributeError) as error:
        raise ProviderError(f"'{library}' is no library of operators for this machine ({error}): {advice}") from None
    version.restype = ctypes.c_char_p
    if (built := version().decode()) != __version__:
        raise ProviderError(f"'{library}' is of tide_export {built}, not {__version__}: {advice}")
    if missing := sorted(set(OPERATORS) - _listed(opened)):
        logger.warning(
            "'%s' was compiled from older sources and lacks operators (%s): functions run in their place, which takes "
            "more time; %s",
            library,
            ", ".join(missing),
            advice,
        )
    return opened


def _listed(library: ctypes.CDLL) -> set[str]:
    """The operators that it has; older ones do not say."""
    if not hasattr(library, "tide_ops_names"):
        return set()
    library.tide_ops_names.restype = ctypes.c_char_p
    return set(library.tide_ops_names().decode().split())


@cache
def _warn_missing(weights: str, consequence: str) -> None:
    logger.warning(
        "the operators for weights in %s are not installed (there was no C++ compiler): %s; install g++, then "
        "tide_export again",
        weights,
        consequence,
    )
