"""How much a run of the networks takes, and the optimization profiles engines are built with for it.

`lower.tensorrt.lower` records the sizes with the networks, `build` builds by these profiles, and the runtime never runs
more.
"""

from dataclasses import replace
from typing import NamedTuple

from tide_export.bundle.manifest import NetworksInfo, Profile
from tide_export.errors import ConfigError

PREFILL_TOKENS = 1024  # most tokens of one run: longer prompts are run in parts
BATCH_SIZE, MAX_BATCH_SIZE = 8, 256  # most sequences of one run: unless told otherwise, and at all


def check_batch_size(rows: int) -> int:
    """`rows`, if so many sequences can be asked for.

    Raises:
        ConfigError: they cannot.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= MAX_BATCH_SIZE:
        raise ConfigError(f"batch_size must be a whole number from 1 to {MAX_BATCH_SIZE}, not {rows!r}")
    return rows


class RunSizes(NamedTuple):
    """See the fields of `NetworksInfo`."""

    max_tokens: int
    max_logits: int
    max_batch_size: int
    max_slot_tokens: int


def run_sizes(capacity: int, max_pending: int, rows: int = 1, bound: int | None = None) -> RunSizes:
    """What the networks of a bundle are meant to take in one run.

    Args:
        capacity: tokens the K/V buffers hold.
        max_pending: tokens that may wait. Catching up, and so the head in verifying, ends at the power of two that the
            run over them and the new one is padded to (see `runtime.segmented.sequence_memory`).
        rows: sequences that may be run together.
        bound: tokens of one run, of all its sequences, where that is fewer than PREFILL_TOKENS.
    """
    most = min(PREFILL_TOKENS, capacity, bound or PREFILL_TOKENS)
    rows = min(rows, most)
    logits = min(max(1 << max_pending.bit_length(), 1 << (rows - 1).bit_length()), most)
    return RunSizes(most, logits, rows, max(1, min(logits, most // rows)))


def with_rows(info: NetworksInfo, rows: int) -> NetworksInfo:
    """The same networks, meant for so many sequences together."""
    rows = min(rows, info.max_tokens)
    return replace(info, max_batch_size=rows, max_slot_tokens=max(1, min(info.max_logits, info.max_tokens // rows)))


def profiles_for(info: NetworksInfo) -> tuple[Profile, ...]:
    """The optimization profiles of a segment.

    Of one sequence: one new token, catching up, a prompt; together they take any number of tokens up to the last one's
    most. Of several: one new token each, and up to `max_slot_tokens` each. One sequence keeps profiles of its own, so
    that TensorRT chooses its kernels for it alone; longer runs of a batch go sequence by sequence through those.
    """
    catch_up, most, rows = info.max_logits, info.max_tokens, info.max_batch_size
    found = [Profile("decode", 1, 1, 1, 1), Profile("catch-up", 1, max(1, catch_up // 2), catch_up, 1)]
    found.append(Profile("prefill", 1, max(1, most // 2), most, 1))
    if rows > 1:
        found.append(Profile("batch-decode", 1, 1, 1, rows))
        found.append(Profile("batch-catch-up", 1, max(1, info.max_slot_tokens // 2), info.max_slot_tokens, rows))
    return tuple(found)
