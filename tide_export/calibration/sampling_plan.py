"""Decides, before the model runs, which tokens of a split are kept and which are run together: part of `collect`.

The lengths of all sequences are known, so both are functions of the text and the settings alone. That is what makes the
result the same however many processes share the work and however often it was interrupted. A token that nobody keeps
is run only where a later one of its sequence needs it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError

SORTED_SEQUENCES = 128  # sequences sorted by length together, so that little is padded


@dataclass(frozen=True, eq=False)
class Batch:
    """One forward pass over B sequences and what is kept of it.

    Attributes:
        ids: token ids, int64 [B, S], padded on the right with any id: behind a causal mask no real token sees it.
        mask: attention mask, int64 [B, S].
        rows, positions: where in the batch the kept tokens are, int64 [k] each.
        slots: where in the sample they belong, int64 [k].
    """

    ids: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    slots: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """Which tokens of `sequences` are kept, and the passes that compute them.

    Attributes:
        sequences: the split.
        seen: its tokens, n of which are kept.
        places: (number of the sequence, position in it) of the token in each slot, int64 [n, 2], in ascending order.
        batches: numbers of the sequences that are run together, int64 [B] each.
        tokens: tokens that each batch runs, padding not counted, int64 [batches].
    """

    sequences: Sequence[TokenSequence]
    seen: int
    places: np.ndarray
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
        """Keeps `capacity` tokens, each set of them equally likely, or all if there are no more.

        A batch has at most `rows_per_pass` sequences of similar length and, where it has more than one, at most
        `tokens_per_pass` tokens with padding.

        Raises:
            CalibrationError: `sequences` have no token.
        """
        ends = np.cumsum([len(sequence.ids) for sequence in sequences], dtype=np.int64)
        seen = int(ends[-1]) if len(ends) else 0
        if not seen:
            raise CalibrationError("the calibration text gives no usable token")
        size = min(capacity, seen)
        kept = np.sort(np.random.default_rng(seed).choice(seen, size, replace=False, shuffle=False))
        numbers = np.searchsorted(ends, kept, side="right")
        starts = ends - [len(sequence.ids) for sequence in sequences]
        places = np.stack([numbers, kept - starts[numbers]], axis=1)
        lengths = np.zeros(len(sequences), np.int64)
        np.maximum.at(lengths, places[:, 0], places[:, 1] + 1)  # a sequence is run as far as its last kept token
        batches = tuple(_batches(lengths, rows_per_pass, tokens_per_pass))
        return cls(sequences, seen, places, batches, np.array([lengths[batch].sum() for batch in batches]))

    @property
    def kept(self) -> int:
        return len(self.places)

    @property
    def next_ids(self) -> np.ndarray:
        """The id of the token that follows each kept one in its sequence, -1 at the end; int64 [n]."""
        found = np.full(self.kept, -1, np.int64)
        for slot, (number, position) in enumerate(self.places):
            ids = self.sequences[number].ids
            if position + 1 < len(ids):
                found[slot] = ids[position + 1]
        return found

    @property
    def documents(self) -> np.ndarray:
        """The document of each kept token, int64 [n]."""
        return np.array([sequence.document for sequence in self.sequences], np.int64)[self.places[:, 0]]

    @property
    def sha256(self) -> str:
        """Over the text, the kept tokens and the batches."""
        digest = hashlib.sha256()
        for sequence in self.sequences:
            digest.update(np.array([sequence.document, len(sequence.ids)], np.int64).tobytes())
            digest.update(np.ascontiguousarray(sequence.ids, np.int64).tobytes())
        for part in (self.places, *self.batches):
            digest.update(np.array(part.shape, np.int64).tobytes() + part.tobytes())
        return digest.hexdigest()

    def batch(self, number: int) -> Batch:
        """The tensors of batch `number`, on the CPU."""
        members = self.batches[number]
        first = np.searchsorted(self.places[:, 0], members, side="left")
        last = np.searchsorted(self.places[:, 0], members, side="right")
        lengths = self.places[last - 1, 1] + 1
        ids = np.zeros((len(members), int(lengths.max())), np.int64)
        for row, (member, length) in enumerate(zip(members, lengths, strict=True)):
            ids[row, :length] = self.sequences[member].ids[:length]
        slots = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        return Batch(
            ids=torch.from_numpy(ids),
            mask=torch.from_numpy((np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)),
            rows=torch.from_numpy(np.repeat(np.arange(len(members)), last - first)),
            positions=torch.from_numpy(np.ascontiguousarray(self.places[slots, 1])),
            slots=slots,
        )


def _batches(lengths: np.ndarray, rows_per_pass: int, tokens_per_pass: int | None) -> list[np.ndarray]:
    """Numbers of the sequences with a length, longest first within each window of neighbours."""
    found: list[np.ndarray] = []
    used = np.flatnonzero(lengths)
    for start in range(0, len(used), SORTED_SEQUENCES):
        window = used[start : start + SORTED_SEQUENCES]
        window = window[np.argsort(-lengths[window], kind="stable")]
        while len(window):
            longest = int(lengths[window[0]])
            rows = rows_per_pass if tokens_per_pass is None else min(rows_per_pass, max(1, tokens_per_pass // longest))
            found.append(window[:rows])
            window = window[rows:]
    return found
