"""Checks that a GPU has enough shared memory for the plugin TideExit with the sizes of some routers.

The networks fix the sizes. A block that asks for more than its GPU has fails in every run, although TensorRT builds the
plan. So such routers are refused before plans are built, or before they are calibrated.
"""

import json
import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tide_export.errors import BuildError, BundleError
from tide_export.names.operators import OP_EXIT
from tide_export.runtime.tensorrt.gpu import block_limits, compute_capability
from tide_export.runtime.tensorrt.plugins import NONE

logger = logging.getLogger("tide_export")

# KiB of shared memory that a block may have, by compute capability ("Compute Capabilities" in NVIDIA's CUDA programming
# guide; the numbers are those of `max_shared_memory_per_block_optin` in cuda/__device/arch_traits.h of NVIDIA's CCCL).
LIMITS = {
    **{(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 8): 99, (8, 9): 99},
    **{(9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99},
}
CLUSTERS = (9, 0)  # the first compute capability whose blocks read each other's shared memory
FLOAT = 4  # bytes
# Of plugins/tide_exit: slots of a team and its blocks; blocks where a GPU allows no more to a cluster; floats in which
# the warps of a block leave their sums.
SLOTS, BLOCKS, MIN_BLOCKS, PARTIAL_SUMS = 4, 16, 8, 8192
# Sizes that can be reduced: field of `ExitSizes`, setting of the calibration, minimum.
SETTINGS = (
    ("shortlist", "router_shortlist", 2),
    ("lens_rank", "lens_rank", 1),
    ("bottleneck", "router_bottleneck_dim", 1),
)


@dataclass(frozen=True)
class ExitSizes:
    """The sizes that the shared memory depends on, each the maximum over a model's routers and lenses.

    Attributes:
        hidden: width of the states that routers read.
        shortlist: tokens of the shortlist; 0: none.
        lens_rank: rank of the lenses; 0: none.
    """

    hidden: int
    bottleneck: int
    shortlist: int
    lens_rank: int


def shared_bytes(sizes: ExitSizes, blocks: int, clusters: bool) -> int:
    """Returns the bytes of shared memory of a block: `Exit::sizes` in plugins/tide_exit/kernel.cu.

    Args:
        blocks: blocks of a team, which divide the channels among them.
        clusters: whether blocks exchange data in shared memory instead of global memory.
    """
    share = math.ceil(sizes.hidden / (8 * blocks)) * 8
    floats = (share + sizes.lens_rank) * SLOTS + PARTIAL_SUMS
    if clusters:  # inner states of the lens, moments, products, verdicts
        floats += (sizes.lens_rank + 3 + sizes.bottleneck + sizes.shortlist + 1) * SLOTS
    return floats * FLOAT


def needed(sizes: ExitSizes, capability: tuple[int, int], multiprocessors: int = BLOCKS) -> int:
    """Returns the maximum bytes of shared memory of a block on a GPU.

    Args:
        multiprocessors: of the GPU; without clusters a team has at most as many blocks.
    """
    if capability >= CLUSTERS:
        return shared_bytes(sizes, MIN_BLOCKS, True)
    blocks = BLOCKS
    while blocks > multiprocessors:
        blocks //= 2
    return shared_bytes(sizes, blocks, False)


def router_file_sizes(path: Path) -> ExitSizes | None:
    """Reads the sizes from the header of a router file; None if there is no file, so nothing exits.

    Raises:
        BundleError: the file is not a router file.
    """
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, path.stat().st_size)))
        header.pop("__metadata__", None)
        shapes = {name: tuple(map(int, tensor["shape"])) for name, tensor in header.items()}
        down = {name: shape for name, shape in shapes.items() if name.endswith(".down.weight")}
        routers = [shape for name, shape in down.items() if name.startswith("routers.")]
        lenses = [shape for name, shape in down.items() if name.startswith("lenses.")]
        return ExitSizes(
            max(shape[1] for shape in routers),
            max(shape[0] for shape in routers),
            shapes.get("shortlist", (0,))[0],
            max((shape[0] for shape in lenses), default=0),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BundleError(f"'{path}' is no router file: export the bundle again or copy it anew") from None


def check_exit_memory(sizes: ExitSizes) -> None:
    """Checks that the plugin runs on this machine's GPU, for which TensorRT builds; no check without one.

    Raises:
        BuildError: it does not; the message says which setting would fit.
    """
    limits, capability = block_limits(), compute_capability()
    if limits is None or capability is None:
        return
    limit, multiprocessors = limits
    size = needed(sizes, capability, multiprocessors)
    if size > limit:
        raise BuildError(
            f"the plugin {OP_EXIT} needs {_kib(size)} KiB of shared memory in each block with these routers, and this "
            f"GPU, of compute capability {_name(capability)}, has {limit // 1024}: "
            + _cure(sizes, lambda smaller: needed(smaller, capability, multiprocessors) <= limit)
        )


def warn_of_exit_memory(sizes: ExitSizes) -> None:
    """Warns of GPUs on which the plugin could not run, for a bundle whose plans are built elsewhere."""

    def runs_on(sizes: ExitSizes, capability: tuple[int, int]) -> bool:
        return needed(sizes, capability) <= LIMITS[capability] * 1024

    without = [capability for capability in LIMITS if not runs_on(sizes, capability)]
    if without:
        logger.warning(
            "on GPUs of compute capability %s plans cannot hold the plugin %s, which needs up to %d KiB "
            "of shared memory in each block with these routers: %s",
            ", ".join(map(_name, without)),
            OP_EXIT,
            max(_kib(needed(sizes, capability)) for capability in without),
            _cure(sizes, lambda smaller: all(runs_on(smaller, capability) for capability in without)),
        )


def _cure(sizes: ExitSizes, fits: Callable[[ExitSizes], bool]) -> str:
    """Returns the advice: the largest value of the first setting that alone makes the plugin fit."""
    without = f"build without it (--plugins {NONE})"
    for field, setting, least in SETTINGS:
        too_large = bisect_left(
            range(getattr(sizes, field)), True, key=lambda n: not fits(replace(sizes, **{field: n}))
        )
        if too_large > least:
            return f"calibrate routers with {setting} {too_large - 1} at most, or {without}"
    return without


def _kib(size: int) -> int:
    return math.ceil(size / 1024)


def _name(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
