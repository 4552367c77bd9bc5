"""Resolves threshold and min_layers to one threshold per checkpoint, the input of the graph.

`validate`, the oracle and `inspect` use it without an engine; the library does the same for every generation.
"""

from collections.abc import Sequence

from tide_export.common.values import real_number, shown, whole_number
from tide_export.errors import GenerationError

MODES = ("auto", "full", "exit", "lossless")
MAX_THRESHOLD = 1.0  # the largest in options and manifests; no score is above it
NEVER_EXIT = 2.0  # above every score; engines take it, and ALWAYS_EXIT, as well
ALWAYS_EXIT = -1.0  # below every score


def resolve_thresholds(
    checkpoints: Sequence[int], threshold: float | Sequence[float], min_layers: int = 0
) -> list[float]:
    """Returns one threshold per checkpoint.

    Args:
        checkpoints: layers before each checkpoint, ascending, e.g. `[4, 8, 12]`.
        threshold: one value in [0, 1] for all, or one per checkpoint.
        min_layers: checkpoints after fewer layers never exit.

    Raises:
        GenerationError: a threshold is outside [0, 1], their number is wrong, or min_layers is negative.
    """
    whole_number("min_layers", min_layers, minimum=0)
    values = [threshold] * len(checkpoints) if isinstance(threshold, int | float) else list(threshold)
    if len(values) != len(checkpoints):
        raise GenerationError(
            f"threshold has {len(values)} values but the model has {len(checkpoints)} checkpoints "
            f"({', '.join(map(str, checkpoints))}): give one value, or one per checkpoint"
        )
    for value in values:
        check_threshold(value)
    return [  # NEVER_EXIT instead of MAX_THRESHOLD, so that no score is computed
        float(value) if layers >= min_layers and value < MAX_THRESHOLD else NEVER_EXIT
        for layers, value in zip(checkpoints, values, strict=True)
    ]


def check_mode(mode: str) -> None:
    """Raises GenerationError for an unknown mode."""
    if not isinstance(mode, str) or mode not in MODES:
        raise GenerationError(f"mode must be 'auto', 'full', 'exit' or 'lossless', not {shown(mode)}")


def check_threshold(value: object) -> float:
    """Returns `value` as a float; GenerationError unless it is a number in [0, 1]."""
    try:
        number = real_number("threshold", value)
    except GenerationError:
        number = -1.0
    if not 0.0 <= number <= MAX_THRESHOLD:
        cure = ", which is text: give a number" if isinstance(value, str) else ""
        raise GenerationError(f"threshold must lie in [0, 1], not {shown(value)}{cure}")
    return number
