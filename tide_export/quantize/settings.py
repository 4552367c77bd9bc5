"""Checks the options of quantized weights before the export starts."""

from typing import Any

from tide_export.bundle.manifest import BLOCK_SIZES, INT8_MATMULS, Quantization
from tide_export.errors import ConfigError

BITS = {"int8": 8, "int4": 4}
QUANTIZED = tuple(BITS)
CALIBRATED = ("gptq",)  # methods that read text
METHODS = ("rtn", *CALIBRATED)
DEFAULTS: dict[str, Any] = {"quantization": "rtn", "accuracy_level": INT8_MATMULS, "symmetric": True}
DEFAULT_BUDGET, MAX_BUDGET = 5.0, 8
DEFAULT_BLOCK_SIZES = {"int8": 64, "int4": 32}


def quantization_settings(
    weights: str,
    method: str | None = None,
    block_size: int | None = None,
    accuracy_level: int | None = None,
    symmetric: bool | None = None,
    budget: float | None = None,
) -> Quantization | None:
    """Returns the settings for `weights`, or None if they are not quantized.

    Options that are None take their default.

    Args:
        weights: as for `export`; "int8" and "int4" are quantized. "auto" takes an accuracy level too, for integers in
            the model's files.
        method: "rtn", round to nearest; "gptq", compensate each rounding error in the weights not yet rounded, on text.
        block_size: number of weights that share a scale; a power of two in 16..256.
        accuracy_level: precision of matmuls, as in com.microsoft.MatMulNBits: 0 the engine's choice, 1 float32,
            2 float16, 3 bfloat16, 4 inputs rounded to 8 bits too.
        symmetric: without zero points.
        budget: of int4 without zero points: bits a weight of layers and head, scales included.

    Raises:
        ConfigError: a value is out of range, or an option of quantized weights is given for other weights.
    """
    options = {
        "quantization": method,
        "block_size": block_size,
        "accuracy_level": accuracy_level,
        "symmetric": symmetric,
    }
    if accuracy_level is not None and accuracy_level not in range(5):
        raise ConfigError(f"accuracy level {accuracy_level} is none of 0, 1, 2, 3, 4")
    if budget is not None and (weights != "int4" or symmetric is False):
        other = weights if weights != "int4" else "--symmetric no"
        raise ConfigError(f"--bits is for weights int4 without zero points, not for {other}: omit one of the two")
    if weights not in BITS:
        for name, value in options.items():
            if value is not None and (weights, name) != ("auto", "accuracy_level"):
                raise ConfigError(f"--{name.replace('_', '-')} is for weights int8 and int4, not for {weights}")
        return None
    given = {name: value for name, value in options.items() if value is not None}
    chosen = DEFAULTS | {"block_size": DEFAULT_BLOCK_SIZES[weights]} | given
    if chosen["quantization"] not in METHODS:
        raise ConfigError(f"quantization {chosen['quantization']!r} is none of {', '.join(METHODS)}")
    if chosen["block_size"] not in BLOCK_SIZES:
        raise ConfigError(f"block size {chosen['block_size']} is none of {', '.join(map(str, BLOCK_SIZES))}")
    if weights == "int4" and chosen["symmetric"] and budget is None:
        budget = DEFAULT_BUDGET
    _check_budget(budget, chosen["block_size"])
    return Quantization(
        method=chosen["quantization"],
        bits=BITS[weights],
        block_size=chosen["block_size"],
        symmetric=chosen["symmetric"],
        accuracy_level=chosen["accuracy_level"],
        budget=budget,
    )


def _check_budget(budget: float | None, block_size: int) -> None:
    least = 4 + 16 / block_size
    if budget is not None and not least <= budget <= MAX_BUDGET:
        raise ConfigError(
            f"--bits {budget:g} does not lie in {least:g}..{MAX_BUDGET}: integers of 4 bits in blocks of {block_size} "
            f"take {least:g} bits with their scales"
        )
