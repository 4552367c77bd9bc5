"""Runs FP8 plans once when they are built: TensorRT may choose FP8 kernels whose results are unstable."""

import logging
from pathlib import Path

import numpy as np

from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import FP8
from tide_export.errors import BuildError
from tide_export.runtime.engine import Engine, open_engine
from tide_export.runtime.tensorrt.flavours import FLAVOURS
from tide_export.runtime.tensorrt.gpu import compute_capability
from tide_export.runtime.tensorrt.plugins import PluginLibrary
from tide_export.thresholds.resolve import NEVER_EXIT

logger = logging.getLogger("tide_export")

PROMPT_TOKENS, NEW_TOKENS = 48, 12
LARGEST_ERROR = 0.2  # of the largest logit, as in `verify.parity.TOLERANCES`: FP8 keeps 4 bits


def check_fp8_plans(folder: Path, plugins: PluginLibrary | None) -> None:
    """Compares a bundle's FP8 plans with its graph on the CPU, which has the same weights in float32.

    At full depth, after a prompt and after each of the tokens that follow it. Other plans are not run. Where no GPU
    runs the plans, a warning says that they were not compared.

    Args:
        folder: the finished bundle.
        plugins: the library that its plans were built with.

    Raises:
        BuildError: a logit is off by more than FP8 explains.
        ProviderError: the plans cannot be loaded.
    """
    bundle = open_bundle(folder, verify=False)
    networks, plans = bundle.manifest.networks, bundle.manifest.engines
    if networks is None or plans is None or networks.matrices != FP8:
        return
    here = compute_capability()
    if here is None or "{}.{}".format(*here) not in plans.compute_capabilities:
        logger.warning(
            "the FP8 plans are not compared with the model, as no GPU here runs them; to do so: validate --provider %s",
            plans.flavour,
        )
        return
    length = min(PROMPT_TOKENS + NEW_TOKENS, networks.capacity)
    text = np.arange(1, length + 1) * 7919 % bundle.manifest.model.vocab_size
    expected = _logits(open_engine(bundle, "cpu"), text)
    found = _logits(open_engine(bundle, plans.flavour, plugins=None if plugins is None else plugins.path), text)
    error, largest = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    if not error <= LARGEST_ERROR * largest:  # NaN, too
        raise BuildError(
            f"{FLAVOURS[plans.flavour].title} {plans.version} computes wrongly in FP8: a logit is off by {error:.2g}, "
            f"where the largest is {largest:.2g}; take another version, or export with --weights bf16 or int4"
        )


def _logits(engine: Engine, text: np.ndarray) -> np.ndarray:
    """Returns the logits at full depth after the first tokens and each of the others, float32 [N, V]."""
    sequence = engine.start([NEVER_EXIT] * len(engine.manifest.checkpoints), max_pending=0)
    first = max(1, len(text) - NEW_TOKENS)
    parts = [text[:first], *text[first:, None]]
    return np.stack([sequence.step(part, full=True).logits for part in parts])
