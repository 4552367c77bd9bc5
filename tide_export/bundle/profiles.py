"""The largest run of the segment networks, and the optimization profiles that plans are built with.

`lower.tensorrt.lower` records the sizes with the networks, `plans.build` builds by these profiles, and the runtime
never runs more.
"""

from dataclasses import replace
from typing import NamedTuple

from tide_export.bundle.plan_fields import NetworksInfo, Profile
from tide_export.common.values import whole_number
from tide_export.errors import ConfigError

PREFILL_TOKENS = 1024  # maximum tokens of a run; longer prompts are run in parts
DECODE_TOKENS = 2  # maximum tokens of the decoding profile, unless a flavour has another (`Flavour.decode_tokens`)
FEWEST_KEYS, USUAL_KEYS = 512, 2048  # tokens of the K/V buffers that attention reads (cpp/src/segmented/run_plan.h)
SPARE_ROWS = 256  # rows of a buffer of hidden states beyond the longest run
BATCH_SIZE, MAX_BATCH_SIZE = 8, 256  # maximum sequences of a run: default and limit


def check_batch_size(batch_size: int) -> int:
    """Returns `batch_size` as an int.

    Raises:
        ConfigError: it is not a whole number, or out of range.
    """
    return whole_number("batch_size", batch_size, 1, MAX_BATCH_SIZE, ConfigError)


class RunSizes(NamedTuple):
    """The sizes of a run, as fields of `NetworksInfo`."""

    max_tokens: int
    max_logits: int
    max_batch_size: int
    max_slot_tokens: int


def run_sizes(capacity: int, max_pending: int, batch_size: int = 1, bound: int | None = None) -> RunSizes:
    """Returns the maximum sizes of a run of a bundle's networks.

    Args:
        capacity: tokens the K/V buffers hold.
        max_pending: maximum pending tokens. A run that catches up, and so the head in verifying, takes pending tokens
            and the new one padded to a power of two (cpp/src/segmented/run_plan.h).
        batch_size: sequences of a run.
        bound: maximum tokens of a run over all its sequences, if fewer than PREFILL_TOKENS.
    """
    max_tokens = min(PREFILL_TOKENS, capacity, bound or PREFILL_TOKENS)
    batch_size = min(batch_size, max_tokens)
    rows = max(1 << max_pending.bit_length(), 1 << (batch_size - 1).bit_length(), DECODE_TOKENS)
    max_logits = min(rows, max_tokens)
    return RunSizes(max_tokens, max_logits, batch_size, max(1, min(max_logits, max_tokens // batch_size)))


def state_rows(capacity: int) -> int:
    """Returns the rows, per sequence, of the buffers before each segment and the head.

    They hold the hidden states of pending tokens and of a run, or of all `capacity` tokens if these are fewer.
    """
    return min(capacity, PREFILL_TOKENS) + SPARE_ROWS


def with_batch_size(info: NetworksInfo, batch_size: int) -> NetworksInfo:
    """Returns `info` for runs over `batch_size` sequences."""
    size = min(batch_size, info.max_tokens)
    return replace(info, max_batch_size=size, max_slot_tokens=max(1, min(info.max_logits, info.max_tokens // size)))


def profiles_for(info: NetworksInfo, decode_tokens: int = DECODE_TOKENS) -> tuple[Profile, ...]:
    """Returns the optimization profiles of a segment.

    For one sequence: one new token, catching up, a prompt. For several: one new token each, and up to
    `max_slot_tokens` each; longer runs of a batch use the first three, sequence by sequence. The profiles are separate
    so that TensorRT chooses kernels for one sequence.
    """
    catch_up, prompt, size, slot = info.max_logits, info.max_tokens, info.max_batch_size, info.max_slot_tokens
    profiles = [Profile("decode", 1, 1, min(decode_tokens, catch_up), 1)]
    profiles.append(Profile("catch-up", 1, max(1, catch_up // 2), catch_up, 1))
    profiles.append(Profile("prefill", 1, max(1, prompt // 2), prompt, 1))
    if size > 1:
        profiles.append(Profile("batch-decode", 1, 1, 1, size))
        profiles.append(Profile("batch-catch-up", 1, max(1, slot // 2), slot, size))
    return tuple(profiles)
