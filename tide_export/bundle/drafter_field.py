"""The field `drafter` of `tide.json`: a drafter's properties for the runtime, and its provenance."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tide_export.bundle.model_info import ModelInfo

CONFIDENCE_INTERVALS = 8
RANGES = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*")


@dataclass(frozen=True)
class DrafterInfo:
    """A drafter whose network is `drafter.onnx`."""

    weights_sha256: str  # of the model that it was trained for, as `model.weights_sha256`
    tokens: str  # ids that it can propose, ascending: "0-3,7" (see `token_ranges`)
    acceptance: tuple[float, ...]  # share of its drafts that are accepted, by confidence
    max_tokens: int  # rows of a sequence, after which it begins anew
    state_size: int  # width of the hidden states that it reads
    layers: tuple[int, ...]  # of the model, after which it reads hidden states; empty: the model's final state
    kv_shape: tuple[int, int] | None = None  # (kv_heads, head_dim) of its keys and values; None: it has none
    record: dict[str, Any] | None = None  # how it was trained (see `drafting.report`)
    kv_layers: tuple[int, ...] | None = None  # of the model, whose K/V it reads if it has none
    num_layers: int | None = None  # that have keys and values of their own; None: 1
    block_size: int | None = None  # it drafts so many tokens less one in one run; None: one token

    @property
    def token_count(self) -> int:
        return sum(last - first + 1 for first, last in ranges_of(self.tokens))


def token_ranges(ids: Iterable[int]) -> str:
    """Returns ascending token ids as text: "0-3,7"."""
    parts = []
    for _, group in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        run = [token for _, token in group]
        parts.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)


def ranges_of(text: str) -> list[tuple[int, int]]:
    """Parses text like "0-3,7" into (first, last) ranges; empty if it is malformed or not ascending."""
    if not RANGES.fullmatch(text):
        return []
    pairs = [(int(ends[0]), int(ends[-1])) for ends in (part.split("-") for part in text.split(","))]
    ends = [end for pair in pairs for end in pair]
    ascending = all(first <= last for first, last in pairs) and all(
        before < after for before, after in zip(ends[1::2], ends[2::2], strict=False)
    )
    return pairs if ascending else []


def check_drafter(
    drafter: DrafterInfo,
    model: ModelInfo,
    require: Callable[[bool, str, str], None],
) -> None:
    """Checks the field against the model's fields, for `manifest._check`."""
    require(
        drafter.weights_sha256 == model.weights_sha256,
        "drafter.weights_sha256",
        "is of another model than the bundle's: run tide-export draft again",
    )
    ranges = ranges_of(drafter.tokens)
    known = bool(ranges) and ranges[-1][1] < model.vocab_size
    require(known, "drafter.tokens", 'must be ascending ranges of the model\'s token ids, such as "0-3,7"')
    shares = len(drafter.acceptance) == CONFIDENCE_INTERVALS and all(0 <= share <= 1 for share in drafter.acceptance)
    require(shares, "drafter.acceptance", f"must have {CONFIDENCE_INTERVALS} values in [0, 1]")
    require(drafter.max_tokens >= 2, "drafter.max_tokens", "must be 2 or more")
    if drafter.kv_layers is None:
        require(drafter.kv_shape is not None, "drafter.kv_shape", "is missing")
        require(min(drafter.kv_shape or (1,)) >= 1, "drafter.kv_shape", "holds a size below 1")
    else:
        own = [layer for layer in model.kv_read(range(model.num_layers)) if layer in drafter.kv_layers]
        rule = "must be ascending layers with keys and values of their own"
        require(bool(own) and own == list(drafter.kv_layers), "drafter.kv_layers", rule)
    own_layers = drafter.num_layers is None or 1 <= drafter.num_layers <= model.num_layers
    require(own_layers, "drafter.num_layers", "must be 1 or more, and at most the model's")
    block = drafter.block_size is None or 2 <= drafter.block_size <= drafter.max_tokens // 2
    require(block, "drafter.block_size", "must be 2 or more, and at most half of max_tokens")
    require(drafter.state_size >= 1, "drafter.state_size", "must be 1 or more")
    layers = drafter.layers
    ascending = list(layers) == sorted(set(layers)) and all(1 <= layer <= model.num_layers for layer in layers)
    require(ascending, "drafter.layers", f"must be ascending and lie in 1..{model.num_layers}")
