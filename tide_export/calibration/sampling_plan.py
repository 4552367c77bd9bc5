"""Plans which tokens of a split are kept and how they are batched, before the model runs.

The plan depends only on text and settings, so that the result is equal for any number of processes and interruptions.
A token that is not kept runs only if a later one of its sequence is kept.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError

SORTED_SEQUENCES = 128  # consecutive sequences that are sorted by length to reduce padding


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of B sequences for one forward pass, of which k tokens are kept.

    Attributes:
        ids: token ids, int64 [B, S], padded on the right with any id, which causal attention ignores.
        mask: attention mask, int64 [B, S].
        rows, positions: indices of the kept tokens in the batch, int64 [k] each.
        slots: indices of the kept tokens in the sample, int64 [k].
    """

    ids: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    slots: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """The n tokens of `sequences` that are kept, and the batches that compute them.

    Attributes:
        sequences: the split.
        seen: number of its tokens from the `first` of each sequence on.
        locations: (index of the sequence, position in it) of each kept token, int64 [n, 2], ascending.
        batches: indices of the sequences of each batch, int64 [B].
        tokens: number of tokens in each batch without padding, int64 [batches].
    """

    sequences: Sequence[TokenSequence]
    seen: int
    locations: np.ndarray
    batches: tuple[np.ndarray, ...]
    tokens: np.ndarray

    @classmethod
    def make(
        cls,
        sequences: Sequence[TokenSequence],
        capacity: int,
        seed: int,
        rows_per_pass: int,
        tokens_per_pass: int | None,
    ) -> "Plan":
        """Draws `capacity` tokens uniformly without replacement, or keeps all if there are fewer.

        Tokens before the `first` of a sequence are not drawn. A batch has at most `rows_per_pass` sequences of similar
        length and, unless it has only one, at most `tokens_per_pass` tokens with padding.

        Raises:
            CalibrationError: `sequences` have no token.
        """
        sizes = np.array([len(sequence.ids) - sequence.first for sequence in sequences], np.int64)
        ends = np.cumsum(sizes)
        seen = int(ends[-1]) if len(ends) else 0
        if not seen:
            raise CalibrationError("the calibration text gives no usable token")
        size = min(capacity, seen)
        kept = np.sort(np.random.default_rng(seed).choice(seen, size, replace=False, shuffle=False))
        numbers = np.searchsorted(ends, kept, side="right")
        firsts = np.array([sequence.first for sequence in sequences], np.int64)
        locations = np.stack([numbers, kept - (ends - sizes)[numbers] + firsts[numbers]], axis=1)
        lengths = np.zeros(len(sequences), np.int64)
        np.maximum.at(lengths, locations[:, 0], locations[:, 1] + 1)  # a sequence runs up to its last kept token
        batches = tuple(_batches(lengths, rows_per_pass, tokens_per_pass))
        return cls(sequences, seen, locations, batches, np.array([lengths[batch].sum() for batch in batches]))

    @property
    def kept(self) -> int:
        return len(self.locations)

    @property
    def next_ids(self) -> np.ndarray:
        """The id that follows each kept token in its sequence, -1 at the end; int64 [n]."""
        next_ids = np.full(self.kept, -1, np.int64)
        for slot, (number, position) in enumerate(self.locations):
            ids = self.sequences[number].ids
            if position + 1 < len(ids):
                next_ids[slot] = ids[position + 1]
        return next_ids

    @property
    def documents(self) -> np.ndarray:
        """The document of each kept token, int64 [n]."""
        return np.array([sequence.document for sequence in self.sequences], np.int64)[self.locations[:, 0]]

    @property
    def sha256(self) -> str:
        """The hash of text, kept tokens and batches."""
        digest = hashlib.sha256()
        for sequence in self.sequences:
            digest.update(np.array([sequence.document, len(sequence.ids)], np.int64).tobytes())
            digest.update(np.ascontiguousarray(sequence.ids, np.int64).tobytes())
        for part in (self.locations, *self.batches):
            digest.update(np.array(part.shape, np.int64).tobytes() + part.tobytes())
        return digest.hexdigest()

    def batch(self, number: int) -> Batch:
        """Builds batch `number` on the CPU."""
        members = self.batches[number]
        first = np.searchsorted(self.locations[:, 0], members, side="left")
        last = np.searchsorted(self.locations[:, 0], members, side="right")
        lengths = self.locations[last - 1, 1] + 1
        ids = np.zeros((len(members), int(lengths.max())), np.int64)
        for row, (member, length) in enumerate(zip(members, lengths, strict=True)):
            ids[row, :length] = self.sequences[member].ids[:length]
        slots = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        return Batch(
            ids=torch.from_numpy(ids),
            mask=torch.from_numpy((np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)),
            rows=torch.from_numpy(np.repeat(np.arange(len(members)), last - first)),
            positions=torch.from_numpy(np.ascontiguousarray(self.locations[slots, 1])),
            slots=slots,
        )


def _batches(lengths: np.ndarray, rows_per_pass: int, tokens_per_pass: int | None) -> list[np.ndarray]:
    """Batches the sequences of length above 0, longest first within each window of SORTED_SEQUENCES."""
    batches: list[np.ndarray] = []
    used = np.flatnonzero(lengths)
    for start in range(0, len(used), SORTED_SEQUENCES):
        window = used[start : start + SORTED_SEQUENCES]
        window = window[np.argsort(-lengths[window], kind="stable")]
        while len(window):
            longest = int(lengths[window[0]])
            rows = rows_per_pass if tokens_per_pass is None else min(rows_per_pass, max(1, tokens_per_pass // longest))
            batches.append(window[:rows])
            window = window[rows:]
    return batches
