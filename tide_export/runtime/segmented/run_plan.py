"""Which places of a batch a segment is run over together, and how far its runs are padded.

A network takes neighbouring places of a batch, because their K/V buffers lie side by side, and the same number of
tokens of each. A run reads its weights once however many places it takes, so places in between that have nothing to run
go along as padding: what that writes lies behind their last token, where it is overwritten before anything reads it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tide_export.bundle.manifest import NetworksInfo


class Run(NamedTuple):
    """A run over places start .. stop-1, `tokens` of each.

    Attributes:
        places: those that have something to run, ascending; the others are padding.
        first: the first that it takes of the tokens a place brings.
    """

    places: tuple[int, ...]
    tokens: int
    first: int = 0

    @property
    def start(self) -> int:
        return self.places[0]

    @property
    def stop(self) -> int:
        return self.places[-1] + 1

    @property
    def rows(self) -> int:
        return self.stop - self.start


def padded(count: int, length: int, most: int, capacity: int) -> int:
    """Tokens to run for `count` of them behind `length` in the cache: the next power of two, where it fits.

    It must fit a run (`most` tokens, the largest optimization profile) and the K/V buffers (`capacity` tokens).
    """
    rounded = 1 << (count - 1).bit_length()
    return rounded if rounded <= most and length + rounded <= capacity else count


def runs_over(counts: Mapping[int, int], lengths: Sequence[int], info: NetworksInfo) -> list[Run]:
    """The runs of one segment over some places of a batch, each place in one of them (in several, if it brings more
    tokens than a run takes).

    Places with few tokens go together, in as few runs as there is room for padding: at a sequence whose buffers are
    nearly full the others are parted. One that brings more than `info.max_slot_tokens`, a prompt, goes by itself, after
    those, so that what their padding wrote behind its last token is written over.

    Args:
        counts: tokens by place, 1 or more.
        lengths: tokens in the segment's K/V buffers, of every place there is.
    """
    runs = list[Run]()
    short = sorted(place for place, count in counts.items() if count <= info.max_slot_tokens)
    for place in short:
        together = _together((*runs[-1].places, place), counts, lengths, info) if runs else None
        if together is None:
            together = _together((place,), counts, lengths, info)
            assert together is not None  # its own tokens fit its own buffers
            runs.append(together)
        else:
            runs[-1] = together
    for place in sorted(counts.keys() - set(short)):
        for first in range(0, counts[place], info.max_tokens):
            chunk = min(counts[place] - first, info.max_tokens)
            tokens = padded(chunk, lengths[place] + first, info.max_tokens, info.capacity)
            runs.append(Run((place,), tokens, first))
    return runs


def _together(
    places: tuple[int, ...], counts: Mapping[int, int], lengths: Sequence[int], info: NetworksInfo
) -> Run | None:
    """One run over all that some places bring; None where there is no room for its padding."""
    longest = max(lengths[places[0] : places[-1] + 1])
    tokens = padded(max(counts[place] for place in places), longest, info.max_slot_tokens, info.capacity)
    return Run(places, tokens) if longest + tokens <= info.capacity else None
