"""Which slots of a batch a segment is run over in one run, and how far runs are padded.

A network takes adjacent slots of a batch, because their K/V buffers are contiguous, and the same number of tokens of
each. A run reads its weights once however many slots it takes, so slots in between that have nothing to run are
included as padding: they are written after their last token, where it is overwritten before anything reads it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tide_export.bundle.engine_fields import NetworksInfo


class Run(NamedTuple):
    """A run over slots start .. stop-1, `tokens` of each.

    Attributes:
        active: those that have something to run, ascending; the others are padding.
    """

    active: tuple[int, ...]
    tokens: int

    @property
    def start(self) -> int:
        return self.active[0]

    @property
    def stop(self) -> int:
        return self.active[-1] + 1

    @property
    def slots(self) -> int:
        return self.stop - self.start


def padded(count: int, length: int, max_tokens: int, capacity: int) -> int:
    """Tokens to run for `count` of them after `length` in the cache: the next power of two, where it fits.

    It must fit a run (`max_tokens`, the largest optimization profile) and the K/V buffers (`capacity` tokens).
    """
    rounded = 1 << (count - 1).bit_length()
    return rounded if rounded <= max_tokens and length + rounded <= capacity else count


def runs_over(counts: Mapping[int, int], lengths: Sequence[int], info: NetworksInfo) -> list[Run]:
    """The runs of one segment over some slots of a batch, each slot in one of them.

    Slots with few tokens are combined in as few runs as there is room for padding: a sequence whose buffers are nearly
    full splits them. One with more than `info.max_slot_tokens`, a prompt, has a run to itself, after those, so that
    what their padding wrote after its last token is overwritten.

    Args:
        counts: tokens by slot, 1 or more, no more than a run takes.
        lengths: tokens in the segment's K/V buffers, of every slot there is.
    """
    runs = list[Run]()
    short = sorted(slot for slot, count in counts.items() if count <= info.max_slot_tokens)
    for slot in short:
        tokens = _padded_tokens((*runs[-1].active, slot), counts, lengths, info) if runs else None
        if tokens is not None:
            runs[-1] = Run((*runs[-1].active, slot), tokens)
        else:  # one slot's tokens always fit its buffers
            runs.append(Run((slot,), padded(counts[slot], lengths[slot], info.max_slot_tokens, info.capacity)))
    for slot in sorted(counts.keys() - set(short)):
        runs.append(Run((slot,), padded(counts[slot], lengths[slot], info.max_tokens, info.capacity)))
    return runs


def _padded_tokens(
    slots: tuple[int, ...], counts: Mapping[int, int], lengths: Sequence[int], info: NetworksInfo
) -> int | None:
    """Tokens of each slot in one run over several; None where there is no room for its padding."""
    longest = max(lengths[slots[0] : slots[-1] + 1])
    tokens = padded(max(counts[slot] for slot in slots), longest, info.max_slot_tokens, info.capacity)
    return tokens if longest + tokens <= info.capacity else None
